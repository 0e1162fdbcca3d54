"""DeepSeek over a cache of latents in fp8: one text, however its steps and mode are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM
from predict.device import library
from predict.errors import UserError
from predict.loading.memory import bytes_per_token
from predict.loading.model import read_spec
from tests.support.golden import GOLDEN
from tests.support.quantized_caches import COMPOSITIONS, config, greedy
from tests.support.schemes import logits_of, relative_error

CASES = ("deepseek_v2", "deepseek_v3")
FP8 = {"cachekv_int8_type": "fp8"}


@pytest.mark.parametrize("absorbs", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_text_does_not_depend_on_how_steps_are_cut(
    compiled: library.Library, name: str, dtype: str, absorbs: bool
) -> None:
    changes: dict[str, Any] = {**FP8, "dtype": dtype, "mla_use_matrix_absorption": absorbs}
    texts = [
        greedy(LLM(config(GOLDEN / name, **changes, **composition))) for composition in COMPOSITIONS
    ]
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("name", CASES)
def test_plain_and_compiled_operators_agree(compiled: library.Library, name: str) -> None:
    plain, fused = (
        logits_of(GOLDEN / name, **FP8, dtype="float32", inference_model=fused)
        for fused in (False, True)
    )
    # A code beside the middle of two may fall to either.
    assert relative_error(fused, plain) < 1e-3


@pytest.mark.parametrize("name", [*CASES, "deepseek_v2_lite"])
def test_logits_are_near_those_of_a_dense_cache(compiled: library.Library, name: str) -> None:
    dense, coded = (
        logits_of(GOLDEN / name, dtype="float32", inference_model=True, **changes)
        for changes in ({}, FP8)
    )
    # A code's error is 2.6 % of its value in the mean.
    assert 0 < relative_error(coded, dense) < 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_takes_a_byte_for_each_value_of_a_latent(dtype: str) -> None:
    spec = read_spec(GOLDEN / "deepseek_v2_lite")[0]
    element = {"float32": 4, "bfloat16": 2}[dtype]
    sizes = [
        bytes_per_token(config(GOLDEN / "deepseek_v2_lite", dtype=dtype, **changes), spec)
        for changes in ({}, FP8)
    ]
    # L 24, R 8, three layers; a scale besides.
    assert sizes == [3 * 32 * element, 3 * (24 + 8 * element + 4)]


@pytest.mark.parametrize("cache_type", ["dynamic", "static", "int4"])
def test_formats_of_keys_and_values_are_refused_by_name(tmp_path: Path, cache_type: str) -> None:
    wanted = config(GOLDEN / "deepseek_v2", cachekv_int8_type=cache_type, inference_model=False)
    said = rf"kv_format {wanted.kv_format} is of keys .*allowed: dense, fp8.; set --cachekv_int8"
    with pytest.raises(UserError, match=said):
        LLM(wanted)
    with pytest.raises(UserError, match=said):
        export_model(wanted, tmp_path / "static")
