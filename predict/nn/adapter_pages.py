"""Pages of adapters beside a network's linears: their order and shapes.

The operators, an exported program's inputs and predict.adapters, which fills the pages, all follow
`paged_slots`. A page has room for PAGE_RANKS ranks of a linear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from predict.nn.blocks import Block, BlockWeights, LinearSlot, LowRankPages
from predict.nn.decoder import Decoder
from predict.nn.spec import DecoderSpec

if TYPE_CHECKING:
    from paddle import Tensor

PAGE_RANKS = 8  # ranks of a page of adapters
PACKED_IN, PACKED_OUT = 16, 32  # columns that the CPU's operators have side by side in one


@dataclass(frozen=True)
class PagedSlot:
    """A linear that adapters may change. name: its place in the decoder's tree, joined by "_"."""

    name: str
    part_sizes: tuple[int, ...]  # output features, as `part_sizes` has them
    in_features: int

    @property
    def page_values(self) -> int:
        """Values of a page, unpacked."""
        return PAGE_RANKS * (len(self.part_sizes) * self.in_features + sum(self.part_sizes))

    def tensors(self, num_pages: int, is_packed: bool) -> list[tuple[str, list[int]]]:
        """Names and shapes of A and B, see LowRank. is_packed: for the CPU's compiled operators."""
        a = [num_pages, len(self.part_sizes), PAGE_RANKS, self.in_features]
        b = [num_pages, PAGE_RANKS, sum(self.part_sizes)]
        if is_packed:
            a, b = packed_shape(a, PACKED_IN), packed_shape(b, PACKED_OUT)
        return [(f"{self.name}_low_rank_a", a), (f"{self.name}_low_rank_b", b)]


def adapted_slots(block: Block, hidden_size: int) -> Iterator[LinearSlot]:
    """The linears of a block that adapters may change, in the block's order."""
    for slot in block.slots(hidden_size):
        if isinstance(slot, LinearSlot) and slot.name in block.adapted:
            yield slot


def part_sizes(block: Block, name: str, hidden_size: int) -> tuple[int, ...]:
    """Output features of each part of a linear that adapters may change, such as gate and up."""
    slots = adapted_slots(block, hidden_size)
    return next(block.adapted_parts(slot) for slot in slots if slot.name == name)


def paged_slots(spec: DecoderSpec) -> Iterator[PagedSlot]:
    """The linears that adapters may change, in the decoder's order."""
    for index, layer in enumerate(spec.layers):
        for number, block in enumerate(layer):
            for slot in adapted_slots(block, spec.hidden_size):
                name = f"layers_{index}_{number}_{slot.name}"
                yield PagedSlot(name, block.adapted_parts(slot), slot.in_features)


def page_tensors(spec: DecoderSpec, num_pages: int, is_packed: bool) -> dict[str, list[int]]:
    """Names and shapes of A and B of each linear. num_pages -1: a run decides."""
    return {
        name: shape
        for slot in paged_slots(spec)
        for name, shape in slot.tensors(num_pages, is_packed)
    }


def low_ranks(spec: DecoderSpec, tensors: Sequence[Tensor]) -> list[LowRankPages]:
    """The tensors of `page_tensors`, by linear."""
    pairs = zip(tensors[::2], tensors[1::2], strict=True)
    slots = zip(paged_slots(spec), pairs, strict=True)
    return [LowRankPages(a, b, slot.part_sizes) for slot, (a, b) in slots]


def with_pages(decoder: Decoder, pages: Iterable[LowRankPages]) -> Decoder:
    """The decoder with room for adapters. pages: of `low_ranks`."""
    left = iter(pages)

    def changed(weights: Any) -> BlockWeights:
        names = [slot.name for slot in adapted_slots(weights.block, 1)]  # of any hidden size
        linears: dict[str, Any] = {
            name: replace(getattr(weights, name), low_rank=next(left)) for name in names
        }
        return replace(weights, **linears)

    return replace(decoder, layers=tuple(tuple(map(changed, layer)) for layer in decoder.layers))


def packed_shape(shape: Sequence[int], group: int) -> list[int]:
    """[..., ranks, columns] packed by groups of columns: [..., groups, ranks, group]."""
    *front, ranks, columns = shape
    return [*front, -(-columns // group), ranks, group]
