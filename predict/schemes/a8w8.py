"""a8w8: int8 weights with one scale per output feature, int8 activations.

Activations meet the weight as q = clip(round((x + shift) * smooth / scale), +-127), half to even as
PaddleNLP rounds; scale is static (calibrated) or each token's absmax / 127.
Compiled tensors: packed, scales, act, smooth, shift. Plain: codes, scale, act, smooth, shift.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.schemes._quantized import (
    Quantized,
    act_tensor,
    dequantized,
    optional_at,
    quantized_rows,
    weight_tensors,
)
from predict.schemes._rounding import RoundWeight, round_on_host

if TYPE_CHECKING:
    from paddle import Tensor

NAME = "a8w8"


def quantize(weight: Any, group_size: int, round_weight: RoundWeight = round_on_host) -> Quantized:
    return Quantized(*round_weight(weight, "int8", -1))


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    made = weight_tensors(weight, NAME, dtype, compiled, place)[:2]
    return (
        *made,
        act_tensor(weight, place),
        optional_at(weight.smooth, np.float32, place),
        optional_at(weight.shift, np.float32, place),
    )


def product(x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale, act, smooth, shift = tensors
    if shift.shape[0] != 1:
        x = x + shift
    if smooth.shape[0] != 1:
        x = x * smooth
    rows, row_scale = quantized_rows(x, act)
    sums = paddle.matmul(rows, codes.astype("float32"), transpose_y=True)
    return sums * row_scale * scale


def plain(tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale = tensors[:2]
    return dequantized(codes, scale, paddle.zeros([1]))
