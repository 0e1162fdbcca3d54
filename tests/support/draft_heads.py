"""Heads in published layouts and heads that are right, and what is recorded of their drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from predict import LLM, EngineConfig
from predict.device import library
from predict.device.place import to_float32
from predict.loading.checkpoint import Checkpoint
from tests.support import drafters, tiny
from tests.support.checkpoints import changed
from tests.support.drafters import (
    HEAD_CONFIG,
    HIDDEN,
    LAYERS,
    NUM_DRAFT_TOKENS,
    VOCAB,
    Tensors,
)
from tests.support.golden import GOLDEN

PROMPT = [5, 17, 3, 88, 120, 44, 9, 150, 7, 61, 33, 2 + 5, 90, 14, 73, 28, 11, 99, 100, 54, 23]
TARGET = {"num_hidden_layers": LAYERS}
EAGLE3 = {**HEAD_CONFIG, "draft_vocab_size": NUM_DRAFT_TOKENS}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "draft_vocab_size": NUM_DRAFT_TOKENS,
    "norm_before_residual": True,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
    "transformer_layer_config": {**HEAD_CONFIG, "model_type": "llama"},
}


class Head(NamedTuple):
    """A published layout: its folder, and its drafts by NumPy."""

    method: str
    config: dict[str, Any]
    tensors: Callable[[], Tensors]
    logits: Callable[..., list[Any]]
    options: Mapping[str, Any] = MappingProxyType({})
    file: str = ""


NORMS = {f"fc_norm.{index}.weight": (HIDDEN,) for index in range(3)}
OLD_NORMS = {f"aux_norm_{name}.weight": (HIDDEN,) for name in ("low", "mid", "high")}


def without(name: str, tensors: Tensors) -> Tensors:
    return {each: value for each, value in tensors.items() if each != name}


def _mapped() -> Tensors:
    return {**drafters.medusa(shared=True), "token_map": np.arange(0, VOCAB, 2)}


def _in_blocks() -> Tensors:
    """vLLM's names of Medusa's heads."""
    made = drafters.medusa()
    return {_vllm(name): value for name, value in made.items()}


def _vllm(name: str) -> str:
    head, _, rest = name.partition(".")
    if rest.startswith("0.linear."):
        return f"blocks.{head}.layers.0.{rest.removeprefix('0.linear.')}"
    return f"lm_heads.{head}.weight"


HEADS = {
    "EAGLE-1": Head("eagle", HEAD_CONFIG, drafters.eagle1, drafters.eagle1_logits),
    "EAGLE-1 without embedding": Head(
        *("eagle", HEAD_CONFIG, lambda: drafters.eagle1(own_embedding=False)),
        drafters.eagle1_logits,
    ),
    "EAGLE-3 of SafeAILab": Head("eagle", EAGLE3, drafters.eagle3, drafters.eagle3_logits),
    "EAGLE-3 of SGLang, outputs": Head(
        "eagle",
        {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
        drafters.eagle3,
        drafters.eagle3_logits,
        {"layers": (2, 4, 5)},
    ),
    "EAGLE-3 of NVIDIA, inputs": Head(
        "eagle",
        {**EAGLE3, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}},
        drafters.eagle3,
        drafters.eagle3_logits,
        {"layers": (2, 3, 6)},
    ),
    "EAGLE-3 of speculators": Head(
        *("eagle", SPECULATORS, lambda: drafters.eagle3(at=drafters.LAYER)),
        *(drafters.eagle3_logits, {"layers": (1, 3, 5), "adds_normed": True}),
    ),
    "EAGLE-3 of the final state": Head(
        "eagle",
        {**EAGLE3, "eagle_config": {"use_aux_hidden_state": False}},
        lambda: drafters.eagle3(num_taps=0),
        drafters.eagle3_logits,
        {"layers": ()},
    ),
    "EAGLE-3, the model's rows": Head(
        *("eagle", {**EAGLE3, "tie_word_embeddings": True}),
        lambda: without("lm_head.weight", drafters.eagle3()),
        drafters.eagle3_logits,
    ),
    "EAGLE-3.1": Head(
        *("eagle", {**EAGLE3, "fc_norm": True, "norm_output": True}),
        lambda: drafters.eagle3(more=NORMS),
        *(drafters.eagle3_logits, {"feeds_normed": True}),
    ),
    "EAGLE-3.1, older names": Head(
        *("eagle", EAGLE3, lambda: drafters.eagle3(more=OLD_NORMS)),
        lambda made, *args, **more: drafters.eagle3_logits(
            {
                name.replace("aux_norm_low", "fc_norm.0")
                .replace("aux_norm_mid", "fc_norm.1")
                .replace("aux_norm_high", "fc_norm.2"): value
                for name, value in made.items()
            },
            *args,
            **more,
        ),
    ),
    "one norm before fc": Head(
        *("eagle", {**EAGLE3, "norm_before_fc": True}),
        lambda: drafters.eagle3(more={"input_norm.weight": (3 * HIDDEN,)}),
        drafters.eagle3_logits,
    ),
    "Medusa": Head(
        *("medusa", {"medusa_num_heads": 2}, drafters.medusa, drafters.medusa_logits),
        file="medusa_lm_head.safetensors",
    ),
    "Medusa of two layers": Head(
        *("medusa", {}, lambda: drafters.medusa(num_layers=2), drafters.medusa_logits),
        {"num_layers": 2},
        "medusa_lm_head.safetensors",
    ),
    "Medusa, the model's matrix": Head(
        *("medusa", {}, lambda: drafters.medusa(shared=True), drafters.medusa_logits),
        file="medusa_lm_head.safetensors",
    ),
    "Medusa, some of the model's rows": Head(
        *("medusa", {"original_lm_head": True}, _mapped, drafters.medusa_logits),
        file="medusa_lm_head.safetensors",
    ),
    "Medusa of vLLM": Head(
        *("medusa", {"num_heads": 3}, _in_blocks),
        lambda _, *args, **more: drafters.medusa_logits(drafters.medusa(), *args, **more),
    ),
}


def settings(target: Path, folder: Path | None, method: str, **more: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model_name_or_path": str(target),
        "dtype": "float32",
        "max_length": 160,
        "block_size": 16,
        "batch_size": 3,
        "attention": "append",
        "inference_model": library.find() is not None,
        "speculate_method": method,
        "speculate_max_draft_token_num": 3,
        "draft_model_name_or_path": None if folder is None else str(folder),
    }
    return EngineConfig(**{**values, **more})


def with_layer(case: str, folder: Path, added: Callable[[Any], Tensors]) -> Path:
    """A golden checkpoint in float32, with more tensors."""
    checkpoint = Checkpoint(GOLDEN / case)
    there = {name: to_float32(checkpoint.read(name)) for name in checkpoint.tensors}
    values = {name: ("F32", value) for name, value in (there | added(there)).items()}
    return changed(case, folder, values)


def written(head: Head, folder: Path) -> Path:
    return drafters.write_head(folder, head.config, head.tensors(), head.file)


@contextmanager
def recorded(llm: LLM) -> Iterator[list[tuple[list[int], list[Any]]]]:
    """Of one request: the tokens before each proposal, and the logits of its drafts."""
    proposer: Any = llm.engine.speculation.proposer
    network, follow = proposer.drafting.runner.network, proposer.follow
    found: list[tuple[list[int], list[Any]]] = []
    forward = network.forward

    def logits(*args: Any) -> Any:
        made = forward(*args)
        if made.logits is not None:
            found[-1][1].append(made.logits.numpy())
        return made

    def followed(tapped: Sequence[Any], hidden: Any) -> None:
        found.append((list(tapped[0].span.request.token_ids), []))
        follow(tapped, hidden)

    network.forward, proposer.follow = logits, followed
    try:
        yield found
    finally:
        network.forward = forward
        del proposer.follow
        found[:] = [each for each in found if each[1]]


WORDS = 60  # tokens, fewer than hidden values: their rows are orthogonal
FOLLOWED = {**TARGET, "vocab_size": WORDS, "num_hidden_layers": 2}


def _rows_and_order() -> tuple[Any, Any]:
    generator = np.random.default_rng(5)
    rows = np.linalg.qr(generator.standard_normal((HIDDEN, HIDDEN)))[0][:WORDS] * HIDDEN**0.5
    return rows.astype(np.float32), generator.permutation(WORDS)


def write_followed(folder: Path, noise: float) -> Path:
    """A model whose next token depends on the last one, the more the smaller the noise."""
    tiny.write(folder, FOLLOWED)
    rows, order = _rows_and_order()
    made = tiny.tensors({**tiny.CONFIG, **FOLLOWED})
    for name, values in made.items():
        if "proj" in name:
            values *= noise
    made["model.norm.weight"][:] = 1
    made["model.embed_tokens.weight"] = rows
    made["lm_head.weight"][order] = rows * (0.05 if noise else 0.2)
    save_file(made, folder / "model.safetensors")
    return folder


def write_knowing(folder: Path, method: str, of: str) -> Path:
    """A head that makes the row of the token behind its place: of the token, or of the state."""
    rows, order = _rows_and_order()
    config = {**HEAD_CONFIG, "vocab_size": WORDS}
    step = rows[order].T @ rows / HIDDEN  # from a token's row to that of the one behind it
    if method == "medusa":
        blocks = {"1.0.linear.weight": np.eye(HIDDEN), "0.0.linear.weight": np.eye(HIDDEN)}
        made: Tensors = {name: np.zeros_like(value) for name, value in blocks.items()}
        made |= {f"{head}.0.linear.bias": np.zeros(HIDDEN) for head in range(2)}
        head = np.zeros((WORDS, HIDDEN))
        head[order] = rows * 0.2
        made |= {"0.1.weight": head @ step, "1.1.weight": head @ step @ step}
        config = {}
    else:
        made = {name: np.zeros_like(value) for name, value in drafters.eagle1().items()}
        made["embed_tokens.weight"] = rows
        made["layers.0.post_attention_layernorm.weight"] = np.ones(HIDDEN)
        made["fc.weight"] = np.concatenate(
            [np.eye(HIDDEN) * (of == "token"), step * (of == "state")], 1
        )
    made = {name: value.astype(np.float32) for name, value in made.items()}
    file = "medusa_lm_head.safetensors" if method == "medusa" else ""
    return drafters.write_head(folder, config, made, file)


KNOWING = [("eagle", "token"), ("eagle", "state"), ("medusa", "state")]
SOME = [[5, 17, 3, 40], [9], [30, 31, 32, 33, 34, 35] * 4]
