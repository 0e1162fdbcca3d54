"""What a rank has of a checkpoint's linears, whatever layout they lie in.

A linear is read as one rank alone would have it, its codes and scales with it, and cut then: so
they are bit for bit those of one rank, online rounding included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.config.schemes import scheme_info
from predict.errors import UserError
from predict.loading.layouts.online import Online
from predict.loading.matrices import padded, taken
from predict.loading.sources import CheckpointSource, RandomSource
from predict.nn.plans import LinearPlan
from predict.nn.shares import Ranges, joined
from predict.schemes import Quantized, float_values

if TYPE_CHECKING:
    from predict.loading.layouts import Layout

DENSE, ORDER = "dense", "g_idx"
E4M3_BLOCK = 128  # rows, and columns, that share a scale of fp8 blocks


class Local:
    """See Layout. Of plans that predict.nn.cuts made; whole: the layout of the whole linears."""

    def __init__(self, whole: Layout):
        self.whole = whole
        self.ignored, self.is_rounded = whole.ignored, whole.is_rounded

    def scheme(self, plan: LinearPlan) -> str:
        """See Layout. Columns that are parts of groups become floats: codes have whole groups."""
        return DENSE if plan.is_scattered else self.whole.scheme(plan.whole or plan)

    def group_size(self, plan: LinearPlan) -> int:
        """See Layout; smaller where a rank's columns begin or end within a group.

        Raises UserError where the scheme has one size of groups.
        """
        size = self.whole.group_size(plan.whole or plan)
        if plan.is_scattered:
            return -1
        if size < 1 or plan.columns is None:
            return size
        assert plan.whole is not None
        own = shared_group(size, plan.columns, plan.whole.in_features)
        info = scheme_info(self.scheme(plan))
        ((begin, end), *more) = plan.columns
        if info.has_blocks and not more and begin // size == (end - 1) // size:
            return size  # all of its columns are of one block
        if own != size and (info.has_blocks or info.group_size):
            raise UserError(
                f"a rank's inputs of {plan.prefixes[0]} are {list(plan.columns)}, within a group "
                f"of {size} that has one scale; use another --tensor_parallel_degree"
            )
        return own

    def expected(self, plan: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        return self.whole.expected(plan.whole or plan)

    def read(self, plan: LinearPlan) -> Quantized:
        if plan.whole is None:
            return self.whole.read(plan)
        if (values := self._values(plan, plan.whole)) is not None:
            return Quantized(values, None)
        weight = self.whole.read(plan.whole)
        if plan.is_scattered:
            weight = Quantized(float_values(self.whole.scheme(plan.whole), weight), None)
        return cut(weight, plan)

    def _values(self, plan: LinearPlan, whole: LinearPlan) -> Any:
        """Floats that are stored as they are used: these alone are read. None: others."""
        source = self.whole.source if isinstance(self.whole, Online) else None
        is_plain = self.scheme(plan) == DENSE and not whole.is_stored_otherwise
        names = tuple(prefix + ".weight" for prefix in whole.prefixes)
        if type(source) is RandomSource and is_plain and plan.rows is not None:
            values = source.part(names, plan.rows, plan.columns, whole.in_features)
            return padded(values, plan.out_features)
        if not isinstance(source, CheckpointSource) or not is_plain:
            return None
        return padded(source.part(names, plan.rows, plan.columns), plan.out_features)

    def bias(self, plan: LinearPlan) -> Any:
        values = self.whole.bias(plan.whole or plan) if plan.keeps_bias else None
        if values is None or plan.rows is None:
            return values
        return padded(taken(values, plan.rows), plan.out_features)

    def stored_bytes(self, plan: LinearPlan) -> int:
        return self.whole.stored_bytes(plan.whole or plan)


def order_of(layout: Layout, plan: LinearPlan) -> npt.NDArray[np.int64] | None:
    """Columns of a whole linear, those of a group one behind the other; None: they lie so."""
    checkpoint = getattr(layout, "checkpoint", None)
    name = next((each for each in layout.expected(plan) if each.endswith(ORDER)), None)
    if checkpoint is None or name is None:
        return None
    order = np.argsort(checkpoint.read(name), kind="stable")
    return None if np.array_equal(order, np.arange(plan.in_features)) else order


def shared_group(size: int, columns: Ranges, num_columns: int) -> int:
    """The largest part of a group's size that the columns' borders are multiples of."""
    borders = {place for ends in columns for place in ends} - {num_columns}
    return math.gcd(size, *borders)


def units(layout: Layout, plans: Iterable[LinearPlan]) -> int:
    """Inputs of the linears that stay together: whole groups of each."""
    return math.lcm(1, *(max(layout.group_size(plan), 1) for plan in plans))


def cut(weight: Quantized, plan: LinearPlan) -> Quantized:
    """What the plan has of the weight of `plan.whole`, with rows of zeros behind where it has more.

    Raises UserError where codes cannot be cut so.
    """
    whole = plan.whole
    assert whole is not None
    rows, columns = plan.rows, plan.columns
    if columns is not None:
        weight = _with_columns(weight, columns, whole)
    if rows is None:
        return weight
    num_rows = whole.out_features

    def of_rows(values: Any) -> Any:
        if values is None or (len(values) == 1 and num_rows != 1):
            return values
        if len(values) == num_rows:
            return padded(taken(values, rows), plan.out_features)
        if all(begin % E4M3_BLOCK == 0 for begin, _ in rows) and len(rows) == 1:
            return taken(values, tuple((b // E4M3_BLOCK, -(-e // E4M3_BLOCK)) for b, e in rows))
        return taken(np.repeat(values, E4M3_BLOCK, axis=0)[:num_rows], rows)  # of each row its own

    return replace(
        weight,
        codes=of_rows(weight.codes),
        scale=of_rows(weight.scale),
        zero=of_rows(weight.zero),
    )


def _with_columns(weight: Quantized, columns: Ranges, plan: LinearPlan) -> Quantized:
    inputs = columns
    if weight.perm is not None:  # codes lie in that order, in which these are one behind the other
        place_of = np.argsort(weight.perm)
        columns = joined((place_of[at], place_of[at] + 1) for b, e in columns for at in range(b, e))
        assert len(columns) == 1, "a share of columns in act-order is cut by order_of"

    def of_groups(values: Any) -> Any:
        if values is None or len(values.shape) < 2 or values.shape[1] == 1:
            return values
        is_float8 = plan.in_features % values.shape[1] or weight.codes.dtype == np.uint8
        size = E4M3_BLOCK if is_float8 else plan.in_features // values.shape[1]
        each = size if is_float8 else shared_group(size, columns, plan.in_features)
        values = values if each == size else np.repeat(values, size // each, axis=1)
        return taken(values, tuple((b // each, -(-e // each)) for b, e in columns), axis=1)

    def of_inputs(values: Any) -> Any:
        return None if values is None else taken(values, inputs)

    return replace(
        weight,
        codes=taken(weight.codes, columns, axis=1),
        scale=of_groups(weight.scale),
        zero=of_groups(weight.zero),
        perm=None,
        smooth=of_inputs(weight.smooth),
        shift=of_inputs(weight.shift),
    )
