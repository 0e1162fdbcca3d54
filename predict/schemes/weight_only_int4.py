"""weight_only_int4: 4-bit weights, one scale and zero per group of columns; float activations."""

from __future__ import annotations

from functools import partial

from predict.schemes._quantized import rounded_by
from predict.schemes._weight_only import plain, product, weight_only_tensors

__all__ = ["NAME", "plain", "product", "quantize", "tensors"]
NAME = "weight_only_int4"
quantize = rounded_by("int4")
tensors = partial(weight_only_tensors, NAME)
