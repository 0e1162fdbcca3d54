"""Weights as the plain operators read them: [N, K], rows as checkpoints store them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from predict.device.place import tensor_at
from predict.schemes import round_on_host

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["fold_norm", "pack_dense", "round_weight", "transposed"]


def pack_dense(weight: Tensor, dtype: str) -> Tensor:
    """Weight [N, K] (any float dtype) in `dtype`; the layout stays."""
    return weight.astype(dtype)


def fold_norm(weight: Tensor, norm: Tensor) -> None:
    """Multiplies the columns of weight [N, K] by norm [K], in place."""
    product = weight.astype("float32") * norm.astype("float32")
    weight.copy_(product.astype(weight.dtype), True)


def round_weight(
    weight: Tensor, rule: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [N, K], scale, and zero or None of weight [N, K], rounded by NumPy.

    By a rule of predict.schemes._rounding. group_size: columns that share a scale, -1 all.
    """
    codes, scale, zero = round_on_host(weight.numpy(), rule, group_size)
    return (
        tensor_at(codes, None),
        tensor_at(scale, None),
        None if zero is None else tensor_at(zero, None),
    )


def transposed(weight: Tensor) -> Tensor:
    """Weight [K, N] as [N, K]."""
    return weight.t().contiguous()
