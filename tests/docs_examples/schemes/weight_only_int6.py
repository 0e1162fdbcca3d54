"""weight_only_int6: weights of 6 bits with a scale per output feature; float activations."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.errors import UserError
from predict.schemes._quantized import Quantized
from predict.schemes._rounding import RoundWeight, as_groups, positive, round_on_host
from predict.schemes._weight_only import plain, product, weight_only_tensors

if TYPE_CHECKING:
    from paddle import Tensor

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "weight_only_int6"
LARGEST = 31  # of a code; a byte holds it


def quantize(weight: Any, group_size: int, round_weight: RoundWeight = round_on_host) -> Quantized:
    """See predict.schemes.Scheme. Its rule is its own: `round_weight` knows none for 6 bits."""
    values = as_groups(weight, 1)[:, 0]  # [N, K] float32
    scale = positive(np.abs(values).max(axis=1)) / LARGEST
    codes = np.rint(values / scale[:, None]).astype(np.int8)
    return Quantized(codes, scale.astype(np.float32))


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    """See predict.schemes.Scheme. The compiled operators have no kernel for it."""
    if compiled is not None:
        raise UserError(f"quant_type {NAME} runs on plain Paddle only; use --inference_model false")
    return weight_only_tensors(NAME, weight, dtype, compiled, place)
