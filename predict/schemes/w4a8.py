"""w4a8: 4-bit weights as weight_only_int4 has them; int8 activations, one scale per token."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.schemes._quantized import Quantized, dequantized, quantized_rows
from predict.schemes._rounding import INT4_ZERO, round_int4
from predict.schemes._weight_only import gathered, plain, weight_only_tensors

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "w4a8"


def quantize(weight: Any, group_size: int) -> Quantized:
    """See predict.schemes.Scheme."""
    codes, scale = round_int4(weight, group_size)
    return Quantized(codes, scale, np.full_like(scale, INT4_ZERO))


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    """See predict.schemes.Scheme."""
    return weight_only_tensors(weight, NAME, dtype, compiled, place)


def product(x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    """See predict.schemes.Scheme."""
    import paddle

    codes, scale, zero, perm = tensors
    rows, row_scale = quantized_rows(gathered(x, perm), paddle.zeros([1]))
    return paddle.matmul(rows, dequantized(codes, scale, zero), transpose_y=True) * row_scale
