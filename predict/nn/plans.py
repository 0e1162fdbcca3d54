"""From a family's names to a network's weights: what is expected, and how it is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from predict.nn.blocks import (
    Block,
    HeadNormSlot,
    HeadSlot,
    LinearSlot,
    Norm,
    NormSlot,
    Slot,
    TableSlot,
)
from predict.nn.shares import Ranges
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames


@dataclass(frozen=True)
class LinearPlan:
    """One linear of the network: its parts in the checkpoint and its sizes."""

    prefixes: tuple[str, ...]
    part_sizes: tuple[int, ...]  # output features of each part
    in_features: int
    has_bias: bool
    # Rows of the one part are `groups` times [queries, key, value], or [gate, up], of so many
    # values each.
    groups: int = 0
    group_sizes: tuple[int, ...] = ()
    transposed: bool = False  # stored [in, out]
    normalized: bool = False  # rows have length 1, and the stored ones have not
    is_expert: bool = False
    is_rounded: bool = True  # see LinearSlot
    # Rows of each head's parts, where operators multiply by those: it stays in the model's dtype.
    head_parts: tuple[int, ...] = ()
    # Of a rank: the plan that all ranks have together, and what of its matrix is this one.
    whole: LinearPlan | None = None
    rows: Ranges | None = None
    columns: Ranges | None = None
    keeps_bias: bool = True
    is_scattered: bool = False  # its columns are parts of groups that have one scale

    @property
    def out_features(self) -> int:
        return sum(self.part_sizes)

    @property
    def is_stored_otherwise(self) -> bool:
        """Whether the checkpoint's matrix is not the network's as it is."""
        return self.transposed or self.normalized or self.groups > 0

    def row_order(self) -> npt.NDArray[np.int64] | None:
        """The checkpoint's rows in the network's order; None: the order is the same."""
        if not self.groups:
            return None
        rows = np.arange(self.out_features).reshape(self.groups, -1)
        parts = np.split(rows, np.cumsum(self.group_sizes)[:-1], axis=1)
        return np.concatenate([part.reshape(-1) for part in parts])


@dataclass(frozen=True)
class ExpertsPlan:
    """A linear of each expert, alike in size: a plan for every one."""

    experts: tuple[LinearPlan, ...]


@dataclass(frozen=True)
class TablePlan:
    """A tensor that no scheme stores: its name and its shape in the checkpoint, and its own."""

    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    is_float32: bool  # else of the model's dtype
    rows: Ranges | None = None  # of a rank, those of its stored ones; None: all


@dataclass(frozen=True)
class NormPlan:
    """A norm of the network: names of its factor and its bias, and its size."""

    norm: Norm
    weight: str
    bias: str | None
    size: int
    rows: Ranges | None = None  # of a rank, those of its values; None: all


@dataclass(frozen=True)
class HeadNormPlan:
    """Norms of heads that have a factor each [heads, size]: tensors one below the other."""

    norm: Norm
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes: [heads, size] or [size]
    size: int
    rows: Ranges | None = None  # of a rank, those of its heads; None: all


SlotPlan: TypeAlias = LinearPlan | ExpertsPlan | TablePlan | NormPlan | HeadNormPlan


@dataclass(frozen=True)
class BlockPlan:
    """A block of the network, and where each of its slots comes from."""

    block: Block
    slots: Mapping[str, SlotPlan]

    def linears(self) -> Iterator[tuple[str, LinearPlan]]:
        """The linears by slot; of experts one after another."""
        for name, plan in self.slots.items():
            if isinstance(plan, LinearPlan):
                yield name, plan
            elif isinstance(plan, ExpertsPlan):
                for expert in plan.experts:
                    yield name, expert

    def tables(self) -> Iterator[TablePlan]:
        """The tensors that no scheme stores, norms apart."""
        for plan in self.slots.values():
            if isinstance(plan, TablePlan):
                yield plan

    def norms(self) -> Iterator[tuple[str, NormPlan]]:
        """The norms by slot, those of heads with a factor each apart."""
        for name, plan in self.slots.items():
            if isinstance(plan, NormPlan):
                yield name, plan


LayerPlan: TypeAlias = tuple[BlockPlan, ...]


@dataclass(frozen=True)
class WeightPlan:
    """Every tensor that a network needs, by checkpoint name."""

    spec: DecoderSpec
    embedding: str
    positions: str
    types: str
    embedding_norm: NormPlan | None
    embedding_projection: LinearPlan | None
    final_norm: NormPlan | None
    head_projection: LinearPlan | None
    head: LinearPlan  # with tied embeddings its weight is the embedding's
    layers: tuple[LayerPlan, ...]
    ignored: tuple[str, ...]
    whole: WeightPlan | None = None  # of a rank's, the plan of the whole network

    def blocks(self) -> Iterator[BlockPlan]:
        for layer in self.layers:
            yield from layer

    def linears(self) -> Iterator[LinearPlan]:
        """The layers' linears, the head apart."""
        for block in self.blocks():
            for _, linear in block.linears():
                yield linear

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Names and shapes of the tables that rows are taken from."""
        spec = self.spec
        yield self.embedding, (spec.head_rows, spec.embedding.width or spec.hidden_size)
        if spec.embedding.num_positions:
            yield self.positions, (spec.embedding.num_positions, spec.hidden_size)
        if spec.embedding.num_types:
            yield self.types, (spec.embedding.num_types, spec.hidden_size)

    def projections(self) -> Iterator[LinearPlan]:
        """Linears between the embedding, the layers and the head."""
        for linear in (self.embedding_projection, self.head_projection):
            if linear is not None:
                yield linear

    def stored_linears(self) -> Iterator[LinearPlan]:
        """All linears with a matrix of their own in the checkpoint."""
        yield from self.linears()
        yield from self.projections()
        if not self.spec.tie_word_embeddings:
            yield self.head

    def norms(self) -> Iterator[NormPlan]:
        for norm in (self.embedding_norm, self.final_norm):
            if norm is not None:
                yield norm
        for block in self.blocks():
            for _, norm in block.norms():
                yield norm

    def small_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the norms' weights and biases, and of tables within blocks."""
        for block in self.blocks():
            for table in block.tables():
                yield table.name, table.stored_shape
        for norm in self.norms():
            yield norm.weight, (norm.size,)
            if norm.bias is not None:
                yield norm.bias, (norm.size,)
        for block in self.blocks():
            for plan in block.slots.values():
                if isinstance(plan, HeadNormPlan):
                    yield from plan.tensors


def plan_weights(spec: DecoderSpec, names: WeightNames) -> WeightPlan:
    """Resolves a family's names for every layer of a spec."""
    hidden, head_width = spec.hidden_size, spec.head.width

    def between(norm: Norm | None, name: str) -> NormPlan | None:
        return None if norm is None else norm_plan(norm, name, hidden)

    def projection(name: str, size: int | None, in_features: int | None) -> LinearPlan | None:
        if size is None or in_features is None:
            return None
        return LinearPlan((name,), (size,), in_features, False, transposed=names.transposed)

    tied = spec.tie_word_embeddings
    head = names.embedding.removesuffix(".weight") if tied else names.head
    return WeightPlan(
        spec=spec,
        embedding=names.embedding,
        positions=names.positions,
        types=names.types,
        embedding_norm=between(spec.embedding.norm, names.embedding_norm),
        embedding_projection=projection(names.embedding_projection, hidden, spec.embedding.width),
        final_norm=between(spec.head.norm, names.final_norm),
        head_projection=projection(names.head_projection, head_width, hidden),
        head=LinearPlan(
            (head,),
            (spec.vocab_size,),
            head_width or hidden,
            spec.head.bias,
            normalized=spec.head.normalized,
        ),
        layers=tuple(
            tuple(
                block_plan(names, hidden, index, number, block)
                for number, block in enumerate(layer)
            )
            for index, layer in enumerate(spec.layers)
        ),
        # A tied checkpoint may still carry its head; it is the embedding.
        ignored=names.unread + ((names.head,) if tied else ()),
    )


def block_plan(
    names: WeightNames, hidden_size: int, index: int, number: int, block: Block
) -> BlockPlan:
    """Of block `number` of layer `index`."""
    at = names.layer.format(layer=index) + (f"blocks.{number}." if number > 1 else "")
    slots = {}
    for slot in block.slots(hidden_size):
        name = block.name(slot.name, names)
        whole = (at + name,) if isinstance(name, str) else tuple(at + part for part in name)
        slots[slot.name] = _slot_plan(names, block, slot, whole)
    return BlockPlan(block, slots)


def _slot_plan(names: WeightNames, block: Block, slot: Slot, whole: tuple[str, ...]) -> SlotPlan:
    """Where a slot's weights come from. whole: its names in the checkpoint."""
    if isinstance(slot, HeadNormSlot):
        return _head_norm_plan(slot, whole)
    if isinstance(slot, NormSlot):
        return norm_plan(slot.norm, whole[0], slot.size)
    if isinstance(slot, TableSlot):
        is_row = slot.name == "correction" and names.correction_is_row
        stored = (1, *slot.shape) if is_row else slot.stored or slot.shape
        return TablePlan(whole[0], stored, slot.shape, slot.is_float32)
    if isinstance(slot, HeadSlot):
        parts, size = slot.part_sizes, slot.out_features
        return LinearPlan(whole, (size,), slot.in_features, False, head_parts=parts)
    plan = _linear_plan(names, block, slot, whole)
    if not slot.num_experts:
        return plan
    return ExpertsPlan(
        tuple(
            replace(plan, prefixes=tuple(prefix.format(expert=expert) for prefix in whole))
            for expert in range(slot.num_experts)
        )
    )


def norm_plan(norm: Norm, name: str, size: int) -> NormPlan:
    """Where a norm over `size` values comes from, whose weight has the name."""
    bias = name.removesuffix(".weight") + ".bias" if norm.bias else None
    return NormPlan(norm, name, bias, size)


def _head_norm_plan(slot: HeadNormSlot, names: tuple[str, ...]) -> HeadNormPlan:
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for name, count in zip(names, slot.num_heads, strict=True):
        if "{head}" in name:
            tensors += [(name.format(head=head), (slot.size,)) for head in range(count)]
        else:
            tensors.append((name, (count, slot.size)))
    return HeadNormPlan(slot.norm, tuple(tensors), slot.size)


def _linear_plan(
    names: WeightNames, block: Block, slot: LinearSlot, prefixes: tuple[str, ...]
) -> LinearPlan:
    sizes, groups, is_expert = slot.part_sizes, 0, slot.num_experts > 0
    group_sizes: tuple[int, ...] = ()
    if len(prefixes) == 1 and len(sizes) > 1:
        groups = block.row_groups(slot, names)
        group_sizes = tuple(size // groups for size in sizes) if groups else ()
        sizes = (sum(sizes),)
    return LinearPlan(
        prefixes,
        sizes,
        slot.in_features,
        slot.has_bias,
        groups,
        group_sizes,
        names.experts_transposed if is_expert else names.transposed,
        is_expert=is_expert,
        is_rounded=slot.is_rounded,
    )
