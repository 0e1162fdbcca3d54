"""A request's text and logprobs, to the last bit, whatever is computed beside it."""

from __future__ import annotations

import pytest

from predict.device import library
from tests.support.batch_invariance import check_ways
from tests.support.paths import DEMO


@pytest.mark.parametrize(
    ("dtype", "scheme", "cache_type"),
    [
        *((dtype, None, None) for dtype in ("float32", "bfloat16", "float16")),
        *(("bfloat16", each, None) for each in ("weight_only_int8", "weight_only_int4")),
        *(("float32", each, None) for each in ("a8w8", "w4a8")),
        *(("bfloat16", None, each) for each in ("dynamic", "int4")),
    ],
)
def test_ways_on_the_cpu(
    compiled: library.Library, dtype: str, scheme: str | None, cache_type: str | None
) -> None:
    check_ways(DEMO, {"dtype": dtype, "quant_type": scheme, "cachekv_int8_type": cache_type}, 9)
