"""Blocks as regatta_blocks takes them: a text of each record, and its tensors in one list.

csrc/runtime/kinds.h reads the text, csrc/blocks/<kind>/kind.cc takes the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from predict.nn.blocks import (
    AttentionBlock,
    Block,
    ExpertBlock,
    LatentAttentionBlock,
    MlpBlock,
    Norm,
    Residual,
)
from predict.nn.decoder import (
    Attention,
    BlockWeights,
    HeadMatrices,
    LatentAttention,
    Linear,
    NormWeights,
)

if TYPE_CHECKING:
    from paddle import Tensor

# The settings of a record beside its block's fields that name a linear's scheme.
STORED = {
    "attention": ("qkv", "out"),
    "latent_attention": ("qkv_a", "q_b", "out"),
    "mlp": ("gate_up", "down"),
    "experts": ("gate_up", "down", "shared_gate_up", "shared_down"),
}
# Linears that may have biases, and the field that says so. A quantized checkpoint may hold some
# where its config.json has none: calibration adds them.
BIASED = {
    "attention": {"qkv": "qkv_bias", "out": "out_bias"},
    "mlp": {"gate_up": "up_bias", "down": "down_bias"},
}


def is_fused(block: Block) -> bool:
    """Whether regatta_blocks computes it."""
    if not isinstance(block, AttentionBlock):
        return True
    return not (block.qk_norm_each or block.prefix_mask or block.positions.two_dimensional)


def folds_norm(block: Block) -> bool:
    """Whether a GPU may keep the block's norm in the matrix behind it (regatta/cuda_ops.h)."""
    if isinstance(block, (ExpertBlock, LatentAttentionBlock)):
        return False  # several matrices, or the router, read what it makes
    parallel = isinstance(block, MlpBlock) and block.parallel
    ends_plain = block.post_norm is None and block.residual == Residual()
    return is_plain_rms(block.norm) and ends_plain and not parallel and is_fused(block)


def is_plain_rms(norm: Norm | None) -> bool:
    """Whether it is an RMS norm with a weight alone."""
    return norm is not None and norm.kind == "rms" and not (norm.bias or norm.plus_one)


def record(weights: BlockWeights) -> str:
    """The block's kind and fields, and how its linears and its cache are stored."""
    linears = {name: getattr(weights, name) for name in STORED[weights.block.kind]}
    stored = {name: linear.scheme for name, linear in linears.items() if linear is not None}
    if isinstance(weights, (Attention, LatentAttention)):
        stored["kv_format"] = weights.kv_format
    if any(linear is not None and linear.low_rank is not None for linear in linears.values()):
        stored["adapters"] = "1"
    biased = BIASED.get(weights.block.kind, {}).items()
    more: Any = {field: True for name, field in biased if getattr(weights, name).bias is not None}
    return text_of(replace(weights.block, **more), **stored)


@cache
def text_of(block: Block, **stored: str) -> str:
    """The block's kind and fields. stored: the schemes of its linears and its cache's format."""
    settings = [*_settings(block), *stored.items()]
    return " ".join([block.kind, *(f"{name}={value}" for name, value in settings)])


def _settings(record: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of a record's fields and of those of the records in it."""
    for field in fields(record):
        value, name = getattr(record, field.name), prefix + field.name
        if is_dataclass(value):
            yield from _settings(value, f"{name}.")
        elif isinstance(value, bool):
            yield name, str(int(value))
        elif value is not None:
            yield name, str(value)


def read_records(text: str) -> list[tuple[str, dict[str, str]]]:
    """Kinds and settings of the records joined in `text`; how weights are stored among them."""
    read = []
    for record_text in text.split("|"):
        kind, *settings = record_text.split(" ")
        read.append((kind, dict(setting.partition("=")[::2] for setting in settings)))
    return read


def settings_of(block: Block) -> dict[str, str]:
    """Names and values of the block's fields, as its record has them."""
    return dict(_settings(block))


def tensors(weights: BlockWeights, ropes: Sequence[Tensor]) -> list[Tensor]:
    """The block's tensors in the operator's order. ropes: the decoder's tables."""
    listed: list[Tensor] = []
    for name in _slot_names(weights.block):
        listed += _of_slot(getattr(weights, name))
    if not isinstance(weights, (Attention, LatentAttention)):
        return listed
    places = weights.block.positions
    if isinstance(weights, Attention) and weights.slopes is not None:
        listed.append(weights.slopes)
    if places.kind == "rotary":
        listed.append(ropes[places.table])
        if places.query_table >= 0:
            listed.append(ropes[places.query_table])
    return listed


@cache
def _slot_names(block: Block) -> tuple[str, ...]:
    return tuple(slot.name for slot in block.slots(1))  # for any hidden size


def _of_slot(weights: Linear | HeadMatrices | NormWeights | Tensor) -> list[Tensor]:
    if isinstance(weights, Linear):
        bias = [] if weights.bias is None else [weights.bias]
        low_rank = [] if weights.low_rank is None else [weights.low_rank.a, weights.low_rank.b]
        return [*weights.tensors, *bias, *low_rank]
    if isinstance(weights, NormWeights):
        return [weights.weight] if weights.bias is None else [weights.weight, weights.bias]
    if isinstance(weights, HeadMatrices):
        kept = [weights.key_up, weights.value_up]
        return kept if weights.key_absorb is None else [*kept, weights.key_absorb]
    return [weights]
