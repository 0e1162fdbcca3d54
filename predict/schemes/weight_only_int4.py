"""weight_only_int4: 4-bit weights, one scale and zero per group of columns; float activations."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from predict.schemes._quantized import Quantized
from predict.schemes._rounding import RoundWeight, round_on_host
from predict.schemes._weight_only import plain, product, weight_only_tensors

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "weight_only_int4"


def quantize(weight: Any, group_size: int, round_weight: RoundWeight = round_on_host) -> Quantized:
    return Quantized(*round_weight(weight, "int4", group_size))


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    return weight_only_tensors(weight, NAME, dtype, compiled, place)
