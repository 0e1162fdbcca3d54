"""weight_only_int8: 8-bit weights, one scale per output feature or group; float activations."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from predict.schemes._quantized import Quantized
from predict.schemes._rounding import round_int8
from predict.schemes._weight_only import plain, product, weight_only_tensors

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "weight_only_int8"


def quantize(weight: Any, group_size: int) -> Quantized:
    """See predict.schemes.Scheme."""
    codes, scale = round_int8(weight, group_size)
    return Quantized(codes, scale[:, 0] if group_size == -1 else scale)


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    """See predict.schemes.Scheme."""
    return weight_only_tensors(weight, NAME, dtype, compiled, place)
