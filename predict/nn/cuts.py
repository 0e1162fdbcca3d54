"""The part of a network that one of several ranks has: its spec, and what its plan reads.

A block's kind says how it is shared (Block.shared, Block.cuts). Weights, caches, kernels, memory
and exports follow from the rank's own spec, and none of them asks for a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from predict.errors import UserError
from predict.nn.blocks import Block, Slot, slot_share
from predict.nn.plans import (
    BlockPlan,
    ExpertsPlan,
    HeadNormPlan,
    LinearPlan,
    NormPlan,
    SlotPlan,
    TablePlan,
    WeightPlan,
)
from predict.nn.shares import Axis, Ranges, Ranks, SlotShare, num_places
from predict.nn.spec import DecoderSpec, Share

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FEATURES = ("inner", "shared", "channels")  # axes that are no heads


def local_spec(
    spec: DecoderSpec, rank: int, size: int, *, unit: int = 1, whole_experts: bool = False
) -> DecoderSpec:
    """The spec of a rank of `size`; the spec itself for one rank. spec: the whole network's.

    unit, whole_experts: see Ranks. Raises UserError where the network cannot be shared so.
    """
    if spec.share is not None:
        spec = spec.share.whole
    ranks = Ranks(rank, size, unit, whole_experts)
    if size == 1:
        return spec
    cuts = (cut for layer in spec.layers for block in layer for cut in block.cuts.values())
    if whole_experts and not any(cut.experts for cut in cuts):
        raise UserError(
            f"expert_parallel_degree {size} gives ranks whole experts, and {spec.model_type} has "
            "none; leave it out"
        )
    layers = tuple(_joined([block.shared(ranks)[0] for block in layer]) for layer in spec.layers)
    return replace(spec, layers=layers, share=Share(spec, ranks))


def _joined(layer: list[Block]) -> tuple[Block, ...]:
    for index in range(1, len(layer)):
        layer[index - 1 : index + 1] = layer[index].joined(layer[index - 1])
    return tuple(layer)


# Of a whole linear: its columns as groups of them have one scale, where that is another order.
Order: TypeAlias = Callable[[LinearPlan], "npt.NDArray[np.int64] | None"]


def local_plan(
    whole: WeightPlan, spec: DecoderSpec, order: Order = lambda plan: None
) -> WeightPlan:
    """The plan of a rank's spec, made of that of the whole network.

    order: inner features are shared in it; heads stay what they are.
    """
    share = spec.share
    if share is None:
        return whole
    tokens: Ranges = (share.tokens(),)
    layers = (
        tuple(
            BlockPlan(block, dict(_slots(plan, share.ranks, spec.hidden_size, order)))
            for block, plan in zip(layer, plans, strict=True)
        )
        for layer, plans in zip(spec.layers, whole.layers, strict=True)
    )
    head = _linear(whole.head, SlotShare(rows=tokens), share.ranks)
    head = replace(head, part_sizes=(share.num_rows,))
    return replace(whole, spec=spec, layers=tuple(layers), head=head, whole=whole)


def own_key_heads(spec: DecoderSpec) -> tuple[Ranges, ...]:
    """Of each layer with a cache, the whole network's key heads that the rank of the spec keeps."""
    share = spec.share
    assert share is not None
    found = (block.shared(share.ranks)[1] for block in share.whole.attention)
    return tuple(axes["key_heads"].ranges if "key_heads" in axes else ((0, 1),) for axes in found)


def linears_of_features(plan: WeightPlan) -> Iterator[LinearPlan]:
    """The whole linears whose inputs are inner features: what Ranks.unit is of."""
    for block in plan.blocks():
        cuts = block.block.cuts
        for name, linear in block.linears():
            if name in cuts and cuts[name].columns in FEATURES:
                yield linear


def _slots(
    plan: BlockPlan, ranks: Ranks, hidden_size: int, order: Order
) -> Iterator[tuple[str, SlotPlan]]:
    """The slots of a rank. plan: of the whole block."""
    _, axes = plan.block.shared(ranks)
    cuts = plan.block.cuts
    readers = {cut.columns: plan.slots.get(name) for name, cut in cuts.items() if cut.columns}

    def ordered(number: int) -> Mapping[str, Axis]:
        """The axes as the product reads them that takes features in. number: of an expert."""
        own = dict(axes)
        for axis in FEATURES:
            reader = readers.get(axis)
            reader = reader.experts[number] if isinstance(reader, ExpertsPlan) else reader
            places = order(reader) if axis in own and isinstance(reader, LinearPlan) else None
            if places is not None:
                own[axis] = own[axis].in_order(places.tolist())
        return own

    def linear(number: int, whole: LinearPlan, slot: Slot) -> LinearPlan:
        cut = cuts[slot.name]
        made = _linear(whole, slot_share(slot, cut, ordered(number)), ranks)
        by_heads = bool(cut.columns) and cut.columns not in FEATURES
        return replace(made, is_scattered=by_heads and order(whole) is not None)

    for slot in plan.block.slots(hidden_size):
        whole = plan.slots[slot.name]
        if slot.name not in cuts:
            yield slot.name, whole
            continue
        share = slot_share(slot, cuts[slot.name], axes)
        if isinstance(whole, LinearPlan):
            yield slot.name, linear(0, whole, slot)
        elif isinstance(whole, ExpertsPlan):
            own = range(*share.experts) if share.experts else range(len(whole.experts))
            experts = tuple(linear(number, whole.experts[number], slot) for number in own)
            yield slot.name, ExpertsPlan(experts)
        else:
            yield slot.name, _slot(whole, slot_share(slot, cuts[slot.name], ordered(0)))


def _slot(plan: TablePlan | NormPlan | HeadNormPlan, share: SlotShare) -> SlotPlan:
    if share.rows is None:
        return plan
    count = num_places(share.rows)
    if isinstance(plan, TablePlan):
        return replace(plan, shape=(count, *plan.shape[1:]), rows=share.rows)
    return replace(plan, rows=share.rows)


def _linear(plan: LinearPlan, share: SlotShare, ranks: Ranks) -> LinearPlan:
    if share.rows is None and share.columns is None:
        return plan
    rows = plan.out_features if share.rows is None else num_places(share.rows)
    columns = plan.in_features if share.columns is None else num_places(share.columns)
    # The bias of a product that is summed over ranks comes in once.
    keeps_bias = share.columns is None or ranks.is_first
    return LinearPlan(
        plan.prefixes,
        (rows,),
        columns,
        plan.has_bias and keeps_bias,
        is_expert=plan.is_expert,
        head_parts=plan.head_parts,
        whole=plan,
        rows=share.rows,
        columns=share.columns,
        keeps_bias=keeps_bias,
    )
