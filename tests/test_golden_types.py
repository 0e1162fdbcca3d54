"""Every family in every kind of number: 16 bits, rounded weights, and a cache in 8 bits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from predict import LLM
from predict.device import library
from tests.support.golden import EVERY_WAY, config, runs
from tests.support.golden_logits import LOGIT_TOLERANCE, logits_and_wanted
from tests.support.schemes import relative_error


class Kind(NamedTuple):
    """Settings, and how far logits may be from those in float32, relative to them.

    Half as much again as the farthest of all goldens, whose matrices of 32 to 96 columns round
    coarsely. Other logits altogether are 1.4 away. Rounding may send a token to another expert:
    then one prompt's logits are far off, and those of the median prompt are not.
    """

    changes: dict[str, Any]
    median: float  # of the rows
    whole: float
    twin: float = LOGIT_TOLERANCE  # of the largest logit: from plain operators, alike rounded


KINDS: dict[str, Kind] = {
    "bfloat16": Kind({"dtype": "bfloat16"}, 0.045, 0.18),
    "weight_only_int8": Kind({"quant_type": "weight_only_int8"}, 0.07, 0.25),
    "weight_only_int4": Kind({"quant_type": "weight_only_int4"}, 0.98, 1.15),
    # An activation between two codes takes either.
    "a8w8": Kind({"quant_type": "a8w8"}, 0.11, 0.3, twin=0.02),
    "int8 cache": Kind({"cachekv_int8_type": "dynamic"}, 0.05, 0.15, twin=0.004),
    "fp8 cache": Kind({"cachekv_int8_type": "fp8"}, 0.16, 0.32, twin=0.004),
}
# Families that keep latents: in fp8, with a scale for each token. int8 is of the keys and values of
# heads, which they do not keep (refused: tests/engine/test_latent_caches.py).
LATENTS = frozenset({"deepseek_v2_lite", "deepseek_v3", "glm4_moe_lite_30b"})


def kinds_of(case: str) -> list[str]:
    """16 bits first."""
    refused = "int8 cache" if case in LATENTS else "fp8 cache"
    return [kind for kind in KINDS if kind != refused]


# Every family in 16 bits and in one other kind, and every kind with several families; all pairs are
# minutes.
ROWS = [
    pytest.param(case, kind, marks=() if place in (0, 1 + number % 4) else pytest.mark.combination)
    for number, case in enumerate(sorted(EVERY_WAY))
    for place, kind in enumerate(kinds_of(case))
]
# Whose median row is farther off, by how much. Plain operators are as far off with the same codes.
FRAGILE = {"opt_350m": 1.7}


def engine(case: str, max_length: int, kind: Kind, fused: bool = True) -> LLM:
    settings = {"batch_size": 8, "inference_model": fused, "attention": "append", **kind.changes}
    return LLM(config(case, max_length=max_length, **settings))


@pytest.mark.parametrize(("case", "kind"), ROWS)
def test_a_family_is_near_its_logits(case: str, kind: str, compiled: library.Library) -> None:
    bounds = KINDS[kind]
    median = min(FRAGILE.get(case, 1.0) * bounds.median, bounds.whole)
    for max_length, which in runs(case):
        logits, wanted = logits_and_wanted(engine(case, max_length, bounds), case, which)
        error = relative_error(logits, wanted)
        assert 0 < error < bounds.whole, f"{error:.3f}"
        rows = [relative_error(*pair) for pair in zip(logits, wanted, strict=True)]
        assert np.median(rows) < median, f"{np.median(rows):.4f}"


@pytest.mark.parametrize(("case", "kind"), [row for row in ROWS if row.values[1] != "bfloat16"])
def test_compiled_operators_give_the_plain_ones_logits(
    case: str, kind: str, compiled: library.Library
) -> None:
    """Of the same codes. Four bits are too far from float32 for a wrong scale to show there."""
    for max_length, which in runs(case):
        got, wanted = (
            logits_and_wanted(engine(case, max_length, KINDS[kind], fused), case, which)[0]
            for fused in (True, False)
        )
        tolerance = KINDS[kind].twin * np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=0)
