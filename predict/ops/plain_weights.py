"""Weights as the plain operators read them: [N, K], rows as checkpoints store them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["fold_norm", "pack_dense"]


def pack_dense(weight: Tensor, dtype: str) -> Tensor:
    """Weight [N, K] (any float dtype) in `dtype`; the layout stays."""
    return weight.astype(dtype)


def fold_norm(weight: Tensor, norm: Tensor) -> None:
    """Multiplies the columns of weight [N, K] by norm [K], in place."""
    product = weight.astype("float32") * norm.astype("float32")
    weight.copy_(product.astype(weight.dtype), True)
