"""Every family in every kind of number: 16 bits, rounded weights, and a cache in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest

from predict import LLM
from predict.device import library
from tests.support.golden import EVERY_WAY, config, runs
from tests.support.golden_logits import logits_and_wanted
from tests.support.schemes import relative_error

# How far logits may be from those in float32, relative to them: half as much again as the farthest
# of all goldens, whose matrices of 32 to 96 columns round coarsely. Other logits altogether are 1.4
# away.
KINDS: dict[str, tuple[dict[str, Any], float]] = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.18),
    "weight_only_int8": ({"quant_type": "weight_only_int8"}, 0.25),
    "weight_only_int4": ({"quant_type": "weight_only_int4"}, 1.15),
    "a8w8": ({"quant_type": "a8w8"}, 0.3),
    "int8 cache": ({"cachekv_int8_type": "dynamic"}, 0.15),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", sorted(EVERY_WAY))
def test_a_family_is_near_its_logits(case: str, kind: str, compiled: library.Library) -> None:
    changes, bound = KINDS[kind]
    settings = {"batch_size": 8, "inference_model": True, "attention": "append", **changes}
    for max_length, which in runs(case):
        llm = LLM(config(case, max_length=max_length, **settings))
        logits, wanted = logits_and_wanted(llm, case, which)
        error = relative_error(logits, wanted)
        assert 0 < error < bound, f"{error:.3f}"
