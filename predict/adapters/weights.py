"""Pages of adapters beside a decoder's linears, and an adapter's values in these pages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from predict.config.adapters import AdaptersConfig
from predict.config.model import DTYPE_BYTES
from predict.device.place import check_holds, put_row, tensor_at
from predict.errors import UserError
from predict.loading.adapters import Adapter, Base, LowRank
from predict.loading.matrices import taken
from predict.nn.adapter_pages import (
    PACKED_IN,
    PACKED_OUT,
    PAGE_RANKS,
    low_ranks,
    packed_shape,
    page_tensors,
    paged_slots,
    part_sizes,
)
from predict.nn.blocks import Block
from predict.nn.blocks import LowRankPages as Pages
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import ADAPTED
from predict.nn.plans import LinearPlan, WeightPlan
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

if TYPE_CHECKING:
    import numpy.typing as npt

    from paddle import Tensor
    from predict.device.devices import Device

MERGE = "merge it with --lora_path"


def base_of(
    plan: WeightPlan, names: WeightNames, config: ConfigReader, takes_turns: bool | None
) -> Base:
    """The network's tensors by the names that adapters use, however its checkpoint stores them.

    Includes tensors that `check_servable` refuses. takes_turns: see Base.
    """
    plan = plan.whole or plan
    shapes: dict[str, tuple[int, ...]] = {**dict(plan.matrices()), **dict(plan.small_tensors())}
    for linear in plan.stored_linears():
        for prefix, size in zip(linear.prefixes, linear.part_sizes, strict=True):
            shape = (linear.in_features, size) if linear.transposed else (size, linear.in_features)
            shapes[f"{prefix}.weight"] = shape
            if linear.has_bias:
                shapes[f"{prefix}.bias"] = (size,)
    return Base.of(plan, names, shapes, config, takes_turns)


def num_pages_for(rank: int) -> int:
    """Pages of an adapter of this rank."""
    return max(-(-rank // PAGE_RANKS), 1)


def num_pool_pages(config: AdaptersConfig) -> int:
    """Pages for all adapters that are on the device at once."""
    return config.max_loras * num_pages_for(config.max_lora_rank)


def pool_bytes(spec: DecoderSpec, num_pages: int, dtype: str) -> int:
    """Bytes of `num_pages` pages of all linears."""
    return num_pages * DTYPE_BYTES[dtype] * sum(slot.page_values for slot in paged_slots(spec))


def adapted_plans(plan: WeightPlan) -> Iterator[tuple[Block, str, LinearPlan]]:
    """Blocks, names and plans of the linears that adapters may change, in the decoder's order."""
    for block in plan.blocks():
        for name, linear in block.linears():
            if name in block.block.adapted:
                yield block.block, name, linear


@dataclass(frozen=True)
class Placement:
    """A model's dtype and place. place, gpu: None on the CPU. is_packed: for its operators."""

    dtype: str
    place: Any = None
    gpu: Device | None = None
    is_packed: bool = False


def empty_pages(spec: DecoderSpec, num_pages: int, placement: Placement) -> list[Pages]:
    """Zeroed pages for each of `paged_slots`."""

    def zeros(shape: list[int]) -> Tensor:
        import paddle

        made = paddle.zeros(shape, placement.dtype)
        return made if placement.place is None else made._copy_to(placement.place, True)

    shapes = page_tensors(spec, num_pages, placement.is_packed)
    return low_ranks(spec, [zeros(shape) for shape in shapes.values()])


def packed(values: npt.NDArray[np.float32], group: int) -> npt.NDArray[np.float32]:
    """The values in the CPU operators' layout, zeros behind the last column."""
    *front, groups, ranks, _ = packed_shape(list(values.shape), group)
    padding = [(0, 0)] * (values.ndim - 1) + [(0, groups * group - values.shape[-1])]
    columns = np.pad(values, padding).reshape(*front, ranks, groups, group)
    return np.ascontiguousarray(columns.swapaxes(-3, -2))


@dataclass(frozen=True)
class PagedLinear:
    """An adapter's values for one linear, page by page, in host memory."""

    a: npt.NDArray[np.float32]  # [pages, parts, PAGE_RANKS, in_features]
    b: npt.NDArray[np.float32]  # [pages, PAGE_RANKS, out_features]


def check_servable(adapter: Adapter, plan: WeightPlan) -> None:
    """Raises UserError for an adapter, fitted, that changes more than low-rank products can."""
    known = {prefix for _, _, linear in adapted_plans(plan) for prefix in linear.prefixes}
    other = [name for name in adapter.linears if name not in known]
    if other or adapter.replaced:
        name = (other or list(adapter.replaced))[0]
        # Operators multiply those of heads into queries and into what attention makes.
        by_head = (linear.prefixes for linear in plan.linears() if linear.head_parts)
        is_by_head = any(name in prefixes for prefixes in by_head)
        but = ", not what makes keys and values of latents" if is_by_head else ""
        raise UserError(
            f"{adapter.directory}: the adapter changes {name}, and beside a model that serves "
            f"others it may change the linears of attention and MLPs alone{but}; {MERGE}"
        )
    special = [name for name, linear in adapter.linears.items() if not linear.is_plain]
    if special:
        raise UserError(
            f"{adapter.directory}: {special[0]} has a magnitude (DoRA) or a bias of its own, which "
            f"no low-rank product adds; {MERGE}"
        )


def targets(adapter: Adapter, plan: WeightPlan) -> tuple[bool, ...]:
    """Which of ADAPTED the adapter changes, in any layer."""
    changed = {
        block.adapted[name]
        for block, name, linear in adapted_plans(plan)
        if any(prefix in adapter.linears for prefix in linear.prefixes)
    }
    return tuple(row in changed for row in range(len(ADAPTED)))


def paged(adapter: Adapter, plan: WeightPlan, num_pages: int) -> list[PagedLinear | None]:
    """An adapter's values for each of `adapted_plans`; None for linears that it changes nowhere.

    Zeros in layers that it does not change, since pages hold old values. Raises UserError for
    values that are not finite.
    """
    changed, hidden = targets(adapter, plan), plan.spec.hidden_size
    whole = (
        _paged(linear, part_sizes(block, name, hidden), adapter.linears, num_pages)
        if changed[block.adapted[name]]
        else None
        for block, name, linear in adapted_plans(plan.whole or plan)
    )
    return own_values(whole, plan)


def own_values(whole: Iterable[PagedLinear | None], plan: WeightPlan) -> list[PagedLinear | None]:
    """What the plan, of a rank or of all, has of an adapter's values."""
    linears = zip(whole, adapted_plans(plan), strict=True)
    return [None if each is None else _own(each, own) for each, (_, _, own) in linears]


def _own(linear: PagedLinear, plan: LinearPlan) -> PagedLinear:
    """What a rank's linear has of all columns and rows: its products are parts of the sum."""
    a = linear.a if plan.columns is None else taken(linear.a, plan.columns, axis=3)
    return PagedLinear(a, linear.b if plan.rows is None else taken(linear.b, plan.rows, axis=2))


def _paged(
    plan: LinearPlan, sizes: tuple[int, ...], found: Mapping[str, LowRank], num_pages: int
) -> PagedLinear:
    ranks = num_pages * PAGE_RANKS
    a = np.zeros((len(sizes), ranks, plan.in_features), np.float32)
    b = np.zeros((plan.out_features, ranks), np.float32)
    ends = np.cumsum(sizes)
    start = 0
    for prefix, size in zip(plan.prefixes, plan.part_sizes, strict=True):
        end = start + size
        if prefix in found:
            rows, columns = found[prefix].factors()
            b[start:end, : len(rows)] = columns
            for part, last in enumerate(ends):
                # Where one matrix makes all parts, each has its A.
                if last > start and last - sizes[part] < end:
                    a[part, : len(rows)] = rows
        start = end
    order = plan.row_order()
    if order is not None:
        b = b[order]
    return PagedLinear(
        np.ascontiguousarray(a.reshape(len(sizes), num_pages, PAGE_RANKS, -1).swapaxes(0, 1)),
        np.ascontiguousarray(b.T.reshape(num_pages, PAGE_RANKS, -1)),
    )


class Shelf(Protocol):
    """Where adapters' values are ready to be written from, and the pages that they go to."""

    def made(self, values: list[PagedLinear | None]) -> Any:
        """The values in the form that `write` takes. Raises UserError for what no page can hold."""

    def write(self, made: Any, pages: Sequence[int]) -> None:
        """Fills pages."""


@dataclass(frozen=True)
class OwnShelf:
    """This process's pages. See Shelf."""

    pools: list[Pages]
    placement: Placement

    def made(self, values: list[PagedLinear | None]) -> list[tuple[Tensor, Tensor] | None]:
        return on_host(values, self.placement)

    def write(self, made: list[tuple[Tensor, Tensor] | None], pages: Sequence[int]) -> None:
        write_pages(made, self.pools, pages, self.placement)


def write_pages(
    linears: list[tuple[Tensor, Tensor] | None],
    pools: list[Pages],
    pages: Sequence[int],
    placement: Placement,
) -> None:
    """Copies an adapter's tensors (a and b of each linear, on the host) into pages of the pools."""
    for values, pool in zip(linears, pools, strict=True):
        if values is None:
            continue  # its table has no pages for a linear that no layer changes
        for whole, part in ((pool.a, values[0]), (pool.b, values[1])):
            there = part if placement.place is None else part._copy_to(placement.place, True)
            for index, page in enumerate(pages):
                put_row(whole, page, there[index], placement.gpu)


def on_host(
    linears: list[PagedLinear | None], placement: Placement
) -> list[tuple[Tensor, Tensor] | None]:
    """The values as tensors of the model's dtype, in its operators' layout.

    Raises UserError for a value outside the dtype's range.
    """

    def tensor(values: npt.NDArray[np.float32], group: int) -> Tensor:
        check_holds(placement.dtype, values, "the adapter", "adapter")
        values = packed(values, group) if placement.is_packed else values
        return tensor_at(values, None).astype(placement.dtype)

    return [
        None if each is None else (tensor(each.a, PACKED_IN), tensor(each.b, PACKED_OUT))
        for each in linears
    ]
