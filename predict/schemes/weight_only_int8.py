"""weight_only_int8: 8-bit weights, one scale per output feature or group; float activations."""

from __future__ import annotations

from functools import partial

from predict.schemes._quantized import rounded_by
from predict.schemes._weight_only import plain, product, weight_only_tensors

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "weight_only_int8"
quantize = rounded_by("int8")
tensors = partial(weight_only_tensors, NAME)
