"""Blocks as regatta_blocks takes them: a text of each record, and its tensors in one list.

csrc/runtime/kinds.h reads the text, csrc/blocks/<kind>/kind.cc takes the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from predict.nn.blocks import (
    Block,
    BlockWeights,
    HeadMatrices,
    Linear,
    NormWeights,
    slot_names,
)

if TYPE_CHECKING:
    from paddle import Tensor


def record(weights: BlockWeights) -> str:
    """The block's kind and fields, and how its linears and its cache are stored."""
    block: Any = weights.block
    linears = weights.linears()
    stored = {name: linear.scheme for name, linear in linears.items()}
    if block.cache_rows:
        stored["kv_format"] = weights.kv_format
    if any(linear.low_rank is not None for linear in linears.values()):
        stored["adapters"] = "1"
    biased = {block.biases[name] for name in block.biases if linears[name].bias is not None}
    return text_of(replace(block, **dict.fromkeys(biased, True)), **stored)


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
    for name in slot_names(weights.block):
        listed += _of_slot(getattr(weights, name))
    return listed + weights.tables(ropes)


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
