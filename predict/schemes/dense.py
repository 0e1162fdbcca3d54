"""dense: weights in the model's own dtype, unquantized."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from predict.nn.weights import LinearPlan, WeightSource, place_tensor

if TYPE_CHECKING:
    from paddle import Tensor

NAME = "dense"


def expected(plan: LinearPlan) -> dict[str, tuple[int, ...]]:
    """See predict.schemes.Scheme."""
    return {
        prefix + ".weight": (size, plan.in_features)
        for prefix, size in zip(plan.prefixes, plan.part_sizes, strict=True)
    }


def load(
    source: WeightSource, plan: LinearPlan, dtype: str, compiled: bool, place: Any = None
) -> list[Tensor]:
    """See predict.schemes.Scheme."""
    import paddle

    names = tuple(prefix + ".weight" for prefix in plan.prefixes)
    values = source.matrix(names, (plan.out_features, plan.in_features))
    if place is not None:
        return [place_tensor(values, dtype, place)]
    weight = paddle.to_tensor(values)
    if compiled:
        from predict import ops

        return [ops.pack_dense(weight, dtype)]
    return [weight.astype(dtype)]


def plain(tensors: list[Tensor]) -> Tensor:
    """See predict.schemes.Scheme."""
    return tensors[0]
