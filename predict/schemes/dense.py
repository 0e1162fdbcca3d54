"""dense: weights in the model's own dtype, unquantized."""

from __future__ import annotations

from typing import TYPE_CHECKING

from predict.nn.weights import LinearPlan, WeightSource

if TYPE_CHECKING:
    from paddle import Tensor

NAME = "dense"


def expected(plan: LinearPlan) -> dict[str, tuple[int, ...]]:
    """See predict.schemes.Scheme."""
    return {
        prefix + ".weight": (size, plan.in_features)
        for prefix, size in zip(plan.prefixes, plan.part_sizes, strict=True)
    }


def load(source: WeightSource, plan: LinearPlan, dtype: str, compiled: bool) -> list[Tensor]:
    """See predict.schemes.Scheme."""
    import paddle

    names = tuple(prefix + ".weight" for prefix in plan.prefixes)
    weight = paddle.to_tensor(source.matrix(names, (plan.out_features, plan.in_features)))
    if compiled:
        from predict import ops

        return [ops.pack_dense(weight, dtype)]
    return [weight.astype(dtype)]


def plain(tensors: list[Tensor]) -> Tensor:
    """See predict.schemes.Scheme."""
    return tensors[0]
