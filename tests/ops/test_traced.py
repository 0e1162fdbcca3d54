"""Plain operators give the same bits in a program as in dynamic mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import paddle
from predict.device.place import divided
from predict.nn import cache_formats
from predict.schemes import _quantized, a8w8_fp8

ROUNDING: dict[str, Callable[[Any], Any]] = {
    "a quotient": lambda rows: divided(rows, 448.0),
    "int8 activations": lambda rows: _quantized.quantized_rows(rows, paddle.zeros([1])),
    "e4m3 activations": lambda rows: a8w8_fp8._rounded_rows(rows, paddle.zeros([1])),
    "an int8 cache": lambda rows: cache_formats.quantize_int8_rows(rows, None),
    "an fp8 cache": lambda rows: cache_formats.quantize_fp8_rows(rows, None),
    "an int4 cache": lambda rows: cache_formats.quantize_int4(rows, None),
}


@pytest.mark.filterwarnings("ignore:Tensor do not have 'place' interface")
@pytest.mark.parametrize("name", ROUNDING)
def test_codes_and_scales_of_rows_are_the_same_in_a_program(name: str) -> None:
    def rounded(rows: Any) -> Any:
        return ROUNDING[name](rows)

    rows = paddle.to_tensor(np.random.default_rng(0).normal(size=(200, 48)).astype(np.float32))
    paddle.jit.ignore_module([_quantized, a8w8_fp8, cache_formats])
    traced = paddle.jit.to_static(rounded, full_graph=True)
    pairs = zip(*(paddle.utils.flatten(way(rows)) for way in (rounded, traced)), strict=True)
    for dynamic, static in pairs:
        np.testing.assert_array_equal(static.numpy(), dynamic.numpy())
