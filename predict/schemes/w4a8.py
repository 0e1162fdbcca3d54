"""w4a8: 4-bit weights as weight_only_int4 has them; int8 activations, one scale per token."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from predict.schemes._quantized import Quantized, dequantized, quantized_rows
from predict.schemes._rounding import RoundWeight, round_on_host
from predict.schemes._weight_only import gathered, plain, weight_only_tensors

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "w4a8"


def quantize(weight: Any, group_size: int, round_weight: RoundWeight = round_on_host) -> Quantized:
    return Quantized(*round_weight(weight, "int4", group_size))


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    return weight_only_tensors(weight, NAME, dtype, compiled, place)


def product(x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale, zero, perm = tensors
    rows, row_scale = quantized_rows(gathered(x, perm), paddle.zeros([1]))
    return paddle.matmul(rows, dequantized(codes, scale, zero), transpose_y=True) * row_scale
