"""Random checkpoints of families that transformers has no class for, computed in NumPy."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.golden import numpy_models
from tests.golden.golden import Array, Greedy
from tests.golden.numpy_families import VOCAB_SIZE, NumpyCase
from tests.golden.numpy_models import Config, Forward, Weights
from tests.golden.twins import check_twin

EMBEDDINGS = ("embed", "lm_head", "output.", "output_layer", "wte")
ATTENTION_OUTPUTS = ("attention.dense", "attn.c_proj", "attention.wo", "o_proj", "out_proj")
LAST_NORMS = ("final_layernorm.weight", "ln_f.weight", "model.norm.weight")


@dataclass(frozen=True)
class NumpyModel:
    """A checkpoint that numpy_models computes; `functions` stand in for some of its own."""

    forward: Forward
    config: Config
    weights: Weights
    functions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows."""
        return VOCAB_SIZE

    def run(self, tokens: Sequence[int], prompt_len: int) -> Array:
        """Logits [len(tokens), vocab_size] of one pass."""
        patched = mock.patch.multiple(numpy_models, **self.functions) if self.functions else None
        with patched or contextlib.nullcontext():
            return self.forward(self.config, self.weights, tokens, prompt_len).astype(np.float32)

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits [len(tokens), vocab_size] of a prompt."""
        return self.run(tokens, len(tokens))

    def has_close_choice(self, tokens: Sequence[int]) -> bool:
        """No family here has experts."""
        return False

    def generate(self, prompt: Sequence[int], num_new_tokens: int) -> Greedy:
        """The greedy continuation of a prompt."""
        tokens, logits = list(prompt), []
        for _ in range(num_new_tokens):
            logits.append(self.run(tokens, len(prompt))[-1])
            tokens.append(int(logits[-1].argmax()))
        return Greedy(tokens[len(prompt) :], np.stack(logits))


@dataclass(frozen=True)
class NumpySource:
    """The checkpoints of one case."""

    case: NumpyCase

    @property
    def min_distinct(self) -> float:
        """The least share of different tokens."""
        return self.case.min_distinct

    @property
    def made_with(self) -> dict[str, str]:
        """What golden.json says of who computed it."""
        return {"numpy_model": self.case.forward.__name__}

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """One prompt of random token ids per length."""
        rng = np.random.default_rng(seed)
        prompts = [rng.integers(0, vocab_size, n).tolist() for n in self.case.prompt_lens]
        if "gmask_token_id" in self.case.config:
            for number, prompt in enumerate(prompts):
                end_prompt(self.case.config, prompt, number)
        return prompts

    def write(self, folder: Path, seed: int) -> None:
        """Write config.json and safetensors of a random model."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        text = json.dumps(dict(sorted(self.case.config.items())), indent=2)
        (folder / "config.json").write_text(text + "\n")
        tensors = random_tensors(self.case, seed)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def load(self, folder: Path) -> NumpyModel:
        """The checkpoint, if transformers agrees."""
        config = json.loads((folder / "config.json").read_text())
        stored = load_file(folder / "model.safetensors")
        weights = {name: tensor.double().numpy() for name, tensor in stored.items()}
        check_twin(config, weights, self.prompts(VOCAB_SIZE, 0)[-1])
        return NumpyModel(self.case.forward, config, weights)

    def without(self, folder: Path) -> Iterator[NumpyModel]:
        """The model without each of its special features."""
        model = self.load(folder)
        for changes in self.case.without:
            functions = {key: value for key, value in changes.items() if callable(value)}
            values = {key: value for key, value in changes.items() if key not in functions}
            removed = {key for key, value in values.items() if value is None}
            config = {**model.config, **values}
            config = {key: value for key, value in config.items() if key not in removed}
            yield replace(model, config=config, functions=functions)


def end_prompt(config: Config, prompt: list[int], number: int) -> None:
    """Make a prompt of ChatGLM-6B of `prompt`: a mask token, <bos>, and none of them elsewhere.

    The third one's mask token is the other one and stands amid the text; the fourth one has tokens
    after <bos>, as a started answer.
    """
    special = config["mask_token_id"]
    prompt[:] = [token % special for token in prompt]
    start = len(prompt) - (17 if number == 3 else 1)
    prompt[start] = config["bos_token_id"]
    if number == 2:
        prompt[start // 2] = config["mask_token_id"]
    else:
        prompt[start - 1] = config["gmask_token_id"]


def random_tensors(case: NumpyCase, seed: int) -> dict[str, torch.Tensor]:
    """Weights that give distinct logits, as hf_models.randomize makes them."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(case.shapes(case.config).items()):
        values = torch.randn(shape, generator=generator)
        if name.endswith("bias"):
            values *= case.bias
        elif len(shape) == 1:
            values = (1 + 0.2 * values) * (case.last_norm if name.endswith(LAST_NORMS) else 1)
        else:
            turned = case.transposed and "embed" not in name
            values *= _scale(case, name) / shape[0 if turned else 1] ** 0.5
            if name == "lm_head.weight" and "z_loss_weight" in case.config:
                values *= 1 + torch.rand(shape[0], 1, generator=generator)
        tensors[name] = values.to(getattr(torch, case.config["torch_dtype"]))
    if case.forward is numpy_models.chatglm:  # it stores one matrix under both names
        tensors["lm_head.weight"] = tensors["transformer.word_embeddings.weight"].clone()
    return tensors


def _scale(case: NumpyCase, name: str) -> float:
    if any(word in name for word in EMBEDDINGS):
        return case.embedding
    if any(word in name for word in ATTENTION_OUTPUTS):
        return case.attention_output
    return case.matrix
