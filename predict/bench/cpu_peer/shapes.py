"""The networks that are measured: published sizes in examples/shapes, or a folder's config.json."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from predict.errors import UserError, one_of
from predict.nn.blocks import AttentionBlock, ExpertBlock, LinearSlot, NormSlot, TableSlot
from predict.nn.spec import DecoderSpec
from predict.system.files import read_json_object

SHAPES = Path(__file__).resolve().parents[3] / "examples" / "shapes"
CONFIG = "config.json"
# Families that gguf_file has a layout for.
GEMMAS = ("gemma3", "gemma3_text")
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", *GEMMAS, "mixtral", "qwen3_moe")
# Fields of a spec by which a file says whose numbers it has.
SIZES = (
    *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_layers"),
    *("num_heads", "num_kv_heads", "head_dim", "tie_word_embeddings"),
)


def known_shapes() -> list[str]:
    """Names of the shapes of this project that can be measured."""
    return sorted(
        path.parent.name
        for path in SHAPES.glob(f"*/{CONFIG}")
        if read_json_object(path).get("model_type") in MODEL_TYPES
    )


def folder_of(shape: str) -> Path:
    """The folder with a shape's config.json: the one of that name in SHAPES, or the path itself.

    Raises UserError for what is neither.
    """
    for folder in (SHAPES / shape, Path(shape)):
        if (folder / CONFIG).is_file():
            return folder
    raise one_of("shapes", shape, (*known_shapes(), f"a folder with a {CONFIG}"))


def sizes_of(spec: DecoderSpec) -> dict[str, Any]:
    """What a file of numbers says of the network."""
    return {name: getattr(spec, name) for name in SIZES}


def plain_attention(spec: DecoderSpec) -> list[AttentionBlock]:
    """The attention of layer after layer, of which there is one kind alone in what is measured."""
    return [block for block in spec.attention if isinstance(block, AttentionBlock)]


def experts_of(spec: DecoderSpec) -> ExpertBlock | None:
    """The experts of layer after layer, which are alike in what is measured; None without any."""
    return next((block for block in spec.blocks() if isinstance(block, ExpertBlock)), None)


def num_parameters(spec: DecoderSpec) -> int:
    """All elements of a network's weights, by which both sides must agree on its sizes."""
    head = spec.vocab_size * spec.hidden_size
    embedding = 0 if spec.tie_word_embeddings else head
    others = spec.hidden_size  # of the last norm
    for block in spec.blocks():
        for slot in block.slots(spec.hidden_size):
            if isinstance(slot, NormSlot):
                others += slot.size
            elif isinstance(slot, TableSlot):
                others += math.prod(slot.shape)
            elif isinstance(slot, LinearSlot) and slot.has_bias:
                others += sum(slot.part_sizes)
    return spec.num_matmul_weights + embedding + others


def check_peer_has(spec: DecoderSpec, shape: str) -> None:
    """Raises UserError for a network that gguf_file has no layout for."""
    methods = {rope.method for rope in spec.ropes}
    attention, experts = plain_attention(spec), experts_of(spec)
    inner = spec.intermediate_size if experts is None else experts.intermediate_size
    lacking = {
        f"layers of {spec.model_type}": spec.model_type not in MODEL_TYPES,
        "biases of the output projection or the MLP": any(
            slot.has_bias and slot.name != "qkv"
            for block in spec.blocks()
            for slot in block.slots(spec.hidden_size)
            if isinstance(slot, LinearSlot)
        ),
        "sliding windows": spec.model_type not in GEMMAS and any(b.window > 0 for b in attention),
        "soft caps": spec.head.softcap or any(block.softcap for block in attention),
        "a scale of scores of its own": any(
            not math.isclose(block.softmax_scale, block.head_dim**-0.5) for block in attention
        ),
        f"{', '.join(sorted(methods))} positions": methods - {"default", "llama3"},
        "layers without experts among those with some": experts is not None
        and sum(isinstance(block, ExpertBlock) for block in spec.blocks()) < spec.num_layers,
        "weights of experts that do not sum to 1": experts is not None
        and not experts.router.renormalize,
        "rows that are not of whole blocks of 32": spec.hidden_size % 32 or inner % 32,
    }
    for what, has in lacking.items():
        if has:
            raise UserError(
                f"--shapes {shape} has {what}, which is not measured beside llama.cpp "
                f"(allowed: {', '.join(known_shapes())}, and folders of a Llama, Qwen2, Qwen3, "
                "Gemma 3, Mixtral or Qwen3-MoE)"
            )
