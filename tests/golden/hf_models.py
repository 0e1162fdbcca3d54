"""Random checkpoints that Hugging Face transformers writes, and what it computes with them."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Mxfp4Config,
)

from tests.golden.families import TOKENS, Case
from tests.golden.golden import Array, Greedy
from tests.golden.published import (
    FP8_CONFIG,
    from_fp8_blocks,
    in_fp8_blocks,
    in_mxfp4,
    publish_config,
    publish_tensors,
)

UNIT_OFFSET = ("gemma", "gemma2", "gemma3", "gemma3_text")  # their norms scale by 1 + weight
POSITIONS = ("embed_positions", "wpe")
ATTENTION_OUTPUTS = ("attention.dense", "attn.c_proj", "attn.dense", "o_proj", "out_proj")
SCALED_BRANCHES = (
    "gemma2",
    "gemma3",
    "gemma3_text",
)  # their embeddings are sqrt(hidden_size) times as large
EMBEDDINGS = ("embed", "wte", "wpe", "lm_head")
NOISE, NUM_DRAWS = 1e-4, 4  # of routers' inputs; float32 sums in another order differ by 1e-5


@dataclass(frozen=True)
class HFModel:
    """A causal model of transformers, ready for inference."""

    model: Any

    @property
    def vocab_size(self) -> int:
        """How many tokens it knows."""
        return int(self.model.config.get_text_config().vocab_size)

    def generate(self, prompt: Sequence[int], num_new_tokens: int) -> Greedy:
        """Greedy continuation by transformers, up to an end-of-text token if there is one."""
        # a copy: dynamic rotary scaling keeps what earlier sequences made of it
        result = copy.deepcopy(self.model).generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=num_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        token_ids = result.sequences[0, len(prompt) :].tolist()
        return Greedy(token_ids, torch.stack(result.logits)[:, 0].float().numpy())

    def logits(self, tokens: Sequence[int]) -> Array:
        """Logits [len(tokens), vocab_size] of one pass."""
        logits = copy.deepcopy(self.model)(torch.tensor([tokens])).logits[0]
        return np.asarray(logits.float().numpy(), dtype=np.float32)

    def has_close_choice(self, tokens: Sequence[int]) -> bool:
        """Whether a router would choose other experts of slightly other inputs."""
        generator = torch.Generator().manual_seed(0)
        close = []

        def check(router: torch.nn.Module, inputs: tuple[torch.Tensor, ...], outputs: Any) -> None:
            chosen = outputs[2].sort(dim=-1).values
            noise = 1 + NOISE * torch.randn(NUM_DRAWS, *inputs[0].shape, generator=generator)
            for drawn in inputs[0] * noise:
                again = router.forward(drawn, *inputs[1:])
                close.append(not torch.equal(chosen, again[2].sort(-1).values))

        routers = [m for m in self.model.modules() if type(m).__name__.lower().endswith("router")]
        handles = [router.register_forward_hook(check) for router in routers]
        self.model(torch.tensor([tokens]))
        for handle in handles:
            handle.remove()
        return any(close)


@dataclass(frozen=True)
class HFSource:
    """The checkpoints of one case by transformers."""

    case: Case

    @property
    def min_distinct(self) -> float:
        """The least share of different tokens."""
        return self.case.min_distinct

    @property
    def made_with(self) -> dict[str, str]:
        """What golden.json says of the libraries."""
        return {"transformers": transformers.__version__}

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """One prompt of random token ids per length."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab_size, length).tolist() for length in self.case.prompt_lens]

    def write(self, folder: Path, seed: int) -> None:
        """Write config.json and safetensors of a random model."""
        shutil.rmtree(folder, ignore_errors=True)
        model = self._build({})
        with torch.no_grad():
            randomize(model, self.case.family, seed)
        model.to(getattr(torch, self.case.dtype))
        model.save_pretrained(folder, max_shard_size=self.case.shard_size)
        (folder / "generation_config.json").unlink(missing_ok=True)
        path = folder / "config.json"
        config = json.loads(path.read_text()) | TOKENS
        published = publish_config(config) if self.case.spelling == 4 else config
        path.write_text(json.dumps(published, indent=2) + "\n")
        if self.case.spelling == 4:
            tensors = publish_tensors(config, load_file(folder / "model.safetensors"))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if self.case.mxfp4:
            published["quantization_config"] = {"quant_method": "mxfp4"}
            path.write_text(json.dumps(published, indent=2) + "\n")
            tensors = in_mxfp4(load_file(folder / "model.safetensors"))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if self.case.fp8:
            published["quantization_config"] = FP8_CONFIG
            path.write_text(json.dumps(published, indent=2) + "\n")
            tensors = in_fp8_blocks(load_file(folder / "model.safetensors"))
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def load(self, folder: Path) -> HFModel:
        """The checkpoint in float32; of float8 blocks a copy that holds their values."""
        if not self.case.fp8:
            return self._load(folder)
        with tempfile.TemporaryDirectory() as temporary:
            plain = Path(temporary)
            config = json.loads((folder / "config.json").read_text())
            del config["quantization_config"]
            (plain / "config.json").write_text(json.dumps(config))
            tensors = from_fp8_blocks(load_file(folder / "model.safetensors"))
            save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
            return self._load(plain)

    def _load(self, folder: Path) -> HFModel:
        model, report = self._models.from_pretrained(
            folder,
            dtype=torch.float32,
            attn_implementation=self.case.attention,
            output_loading_info=True,
            **({"quantization_config": Mxfp4Config(dequantize=True)} if self.case.mxfp4 else {}),
        )
        assert not report["missing_keys"], report
        return HFModel(model.eval())

    def without(self, folder: Path) -> Iterator[HFModel]:
        """The model without each of its special features."""
        state = self.load(folder).model.state_dict()
        for changes in self.case.without:
            plain = self._build(changes).float().eval()
            plain.load_state_dict({name: state[name] for name in plain.state_dict()})
            yield HFModel(plain)

    @property
    def _models(self) -> Any:
        has_eyes = "vision_config" in self.case.config
        return AutoModelForImageTextToText if has_eyes else AutoModelForCausalLM

    def _build(self, changes: Mapping[str, Any]) -> Any:
        """The untrained model of the case, with `changes` of its config."""
        config = AutoConfig.for_model(self.case.family, **self.case.values(changes))
        return self._models.from_config(config, attn_implementation=self.case.attention)


@dataclass(frozen=True)
class Scales:
    """How large the random values are; matrices keep the size of what they multiply at 1."""

    matrix: float = 1.5
    attention_output: float = 1.5
    bias: float = 0.5
    embedding: float = 3.0


# Layers without gates move less: a tied head would say its own input, or what the biases say.
UNGATED = Scales(matrix=3.0, attention_output=9.0, bias=0.2)
SCALES = {
    **dict.fromkeys(("falcon", "gpt2", "gpt_neox", "opt", "phi", "starcoder2"), UNGATED),
    "bloom": Scales(matrix=2.0, attention_output=12.0, bias=0.1),
    "gemma": Scales(matrix=4.0, attention_output=16.0),
    **dict.fromkeys(
        ("granite", "granitemoe"), Scales(embedding=0.7)
    ),  # it has a multiplier of its own
    "stablelm": Scales(matrix=2.0, attention_output=4.0, bias=0.2),
}


def randomize(model: torch.nn.Module, family: str, seed: int) -> None:
    """Weights that give distinct logits: every part of a layer moves the residual stream."""
    generator = torch.Generator().manual_seed(seed)
    scales = SCALES.get(family, Scales())
    for name, tensor in sorted(model.state_dict().items()):
        values = torch.randn(tensor.shape, generator=generator)
        if name.endswith("bias"):
            values *= scales.bias
        elif "norm" in name or tensor.dim() == 1:
            values = 0.2 * values + norm_offset(name, family)
        else:
            transposed = (family == "gpt2" and ".h." in name) or (
                family == "gpt_oss" and ".experts." in name
            )
            values *= matrix_scale(name, scales) / tensor.shape[-2 if transposed else -1] ** 0.5
        tensor.copy_(values)


def norm_offset(name: str, family: str) -> float:
    """What the weights of a norm are about."""
    if "post_" in name and family in SCALED_BRANCHES:
        return 8.0
    return 0.0 if family in UNIT_OFFSET else 1.0


def matrix_scale(name: str, scales: Scales) -> float:
    """The size of a row of the matrix `name`."""
    if any(word in name for word in POSITIONS):
        return 2 * scales.matrix
    if any(word in name for word in EMBEDDINGS):
        return scales.embedding
    if any(word in name for word in ATTENTION_OUTPUTS):
        return scales.attention_output
    return scales.matrix
