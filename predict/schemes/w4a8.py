"""w4a8: 4-bit weights as weight_only_int4 has them; int8 activations, one scale per token."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from predict.schemes._quantized import dequantized, quantized_rows, rounded_by
from predict.schemes._weight_only import gathered, plain, weight_only_tensors

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "w4a8"
quantize = rounded_by("int4")
tensors = partial(weight_only_tensors, NAME)


def product(x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale, zero, perm = tensors
    rows, row_scale = quantized_rows(gathered(x, perm), paddle.zeros([1]))
    return paddle.matmul(rows, dequantized(codes, scale, zero), transpose_y=True) * row_scale
