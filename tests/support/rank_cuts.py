"""What ranks read of a checkpoint, held against what one rank reads."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from predict.loading.layouts.local import Local, order_of, units
from predict.nn.cuts import linears_of_features, local_plan, local_spec
from predict.nn.plans import WeightPlan
from predict.schemes import float_values

SCHEMES: dict[str, dict[str, Any]] = {
    "dense": {},
    **{name: {"scheme": name} for name in ("weight_only_int8", "a8w8", "a8w8_fp8")},
    "groups": {"scheme": "weight_only_int4", "group_size": 64},
    "w4a8": {"scheme": "w4a8"},
    "mxfp4": {"scheme": "weight_only_mxfp4"},
    "blocks": {"scheme": "a8w8_fp8", "block_size": 128},
}


def check_cut(layout: Any, plan: WeightPlan, size: int) -> None:
    """Raises AssertionError unless ranks' linears are parts of the whole ones, bit for bit."""
    unit = units(layout, linears_of_features(plan))
    specs = (local_spec(plan.spec, rank, size, unit=unit) for rank in range(size))
    ranks = [local_plan(plan, spec, partial(order_of, layout)) for spec in specs]
    of_rank = Local(layout)
    for whole, *parts in zip(plan.linears(), *(rank.linears() for rank in ranks), strict=True):
        name, weight = layout.scheme(whole), layout.read(whole)
        values = weight.codes if name == "dense" else float_values(name, weight)
        seen = np.zeros(values.shape, bool)
        for part in parts:
            own = of_rank.read(part)
            rows, columns = (
                np.concatenate([np.arange(*ends) for ends in ranges or ((0, count),)])
                for ranges, count in zip((part.rows, part.columns), values.shape, strict=True)
            )
            place = np.ix_(rows, columns)
            seen[place] = True
            if weight.perm is None:
                np.testing.assert_array_equal(own.codes, weight.codes[place])
            is_dense = of_rank.scheme(part) == "dense"
            found = own.codes if is_dense else float_values(name, own)
            np.testing.assert_array_equal(found, values[place])
            assert found.shape == (part.out_features, part.in_features)
            assert is_dense == (name == "dense" or part.is_scattered)
        assert seen.all()
