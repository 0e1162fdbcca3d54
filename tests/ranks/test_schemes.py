"""Quantized weights and caches on several CPU ranks: as on one, but for the rounding of inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.device import library
from tests.support.layouts import CASES
from tests.support.layouts import GOLDEN as QUANTIZED
from tests.support.rank_jobs import logits_of
from tests.support.rank_models import RankProcesses
from tests.support.tiny import write

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
SIZES = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 256),
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 211,
}
PLAIN = {"inference_model": False}
# Of the largest logit: where a row's inputs have scales of their own, or one; one for their float8.
EXACT, ROUNDED, FLOAT8 = 1e-4, 4e-2, 0.15
ONLINE: dict[str, tuple[float, dict[str, Any]]] = {
    **{f"{name} cache": (EXACT, {"cachekv_int8_type": name}) for name in ("dynamic", "fp8")},
    **{name: (EXACT, {"quant_type": name}) for name in ("weight_only_int8", "weight_only_int4")},
    **{name: (ROUNDED, {"quant_type": name}) for name in ("a8w8", "w4a8")},
    "a8w8_fp8": (FLOAT8, {"quant_type": "a8w8_fp8", **PLAIN}),
    "mxfp4": (EXACT, {"quant_type": "weight_only_mxfp4"}),
    "groups": (EXACT, {"quant_type": "weight_only_int4", "weightonly_group_size": 64}),
    "blocks": (EXACT, {"quant_type": "a8w8_fp8", "weight_block_size": [128, 128], **PLAIN}),
    "plain": (EXACT, {"quant_type": "weight_only_int8", **PLAIN}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model") / "model", SIZES)


def check(ranks: RankProcesses, tolerance: float, **arguments: Any) -> None:
    """Logits and text of ranks, against those of the whole model here."""
    wanted, text = logits_of(0, 1, **arguments)
    found = ranks.run("tests.support.rank_jobs:logits_of", **arguments)
    assert all(each == found[0] for each in found)
    error = np.abs(np.array(found[0][0]) - wanted).max() / np.abs(wanted).max()
    assert error <= tolerance, error
    if tolerance == EXACT:
        assert found[0][1] == text


@pytest.mark.parametrize("case", ONLINE)
def test_schemes(ranks: Callable[[int], RankProcesses], folder: Path, case: str) -> None:
    tolerance, settings = ONLINE[case]
    check(ranks(2), tolerance, source=str(folder), **settings)


@pytest.mark.parametrize("case", CASES)
def test_layouts(ranks: Callable[[int], RankProcesses], case: str) -> None:
    plain = PLAIN if "fp8" in case else {}  # CPUs have no kernels of it
    check(ranks(2), FLOAT8 if plain else ROUNDED, source=str(QUANTIZED / case), **plain)
