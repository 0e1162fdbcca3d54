"""Quantized caches on the GPU: whole answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from predict import LLM
from predict.device import devices
from tests.support.gpu_engines import FORMS, runner_of
from tests.support.gpu_products import DISTANCE
from tests.support.quantized_caches import CACHE_TYPES, COMPOSITIONS, PROMPTS, config, greedy, model
from tests.support.schemes import logits_of, relative_error

SETTINGS = {"device": "gpu", "attention": "append"}


@pytest.fixture(params=CACHE_TYPES)
def cache_type(request: pytest.FixtureRequest, gpu: devices.Device) -> str:
    if request.param == "fp8" and devices.driver_info().gpus[gpu.index].capability < (8, 9):
        pytest.skip("predict.nn.cache_formats.FORMATS: not on this GPU")
    return str(request.param)


def agreement(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> float:
    pairs = [
        (x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)
    ]
    return sum(x == y for x, y in pairs) / len(pairs)


# float32 sums in another order: a code beside the middle of two may fall to the other.
ALIKE = 0.9


@pytest.mark.parametrize("form", FORMS)
def test_text_is_that_of_the_cpu(tmp_path: Path, cache_type: str, form: str) -> None:
    directory = model(tmp_path / "model", {})
    changes = {"cachekv_int8_type": cache_type, "attention": "append", "batch_size": 3}
    cpu = greedy(LLM(config(directory, **changes)))
    llm = FORMS[form](LLM(config(directory, device="gpu", **changes)))
    assert agreement(greedy(llm), cpu) >= ALIKE
    assert bool(runner_of(llm).graphs) == (form != "eager")


DRAFTS = {"batch_size": 2, "speculate_method": "lookahead", "speculate_max_draft_token_num": 4}


@pytest.mark.parametrize(
    "composition", [*COMPOSITIONS, DRAFTS], ids=["alone", "block", "chunks", "preemption", "drafts"]
)
def test_batch_composition_changes_no_text(
    tmp_path: Path, cache_type: str, composition: dict[str, Any]
) -> None:
    directory = model(tmp_path / "model", {})
    settings: dict[str, Any] = {**SETTINGS, "cachekv_int8_type": cache_type}
    together = greedy(LLM(config(directory, **settings, batch_size=5)))
    llm = LLM(config(directory, **{**settings, **composition}))
    assert agreement(greedy(llm), together) >= ALIKE
    assert (llm.stats().num_preemptions > 0) == ("num_cache_blocks" in composition)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_prefix_gives_the_same_text_as_a_computed_one(
    tmp_path: Path, cache_type: str, dtype: str
) -> None:
    directory = model(tmp_path / "model", {})
    llm = LLM(config(directory, cachekv_int8_type=cache_type, dtype=dtype, **SETTINGS))
    computed = greedy(llm, PROMPTS[-1:])
    assert llm.stats().num_prefix_hit_tokens == 0
    cached = greedy(llm, PROMPTS[-1:])
    assert llm.stats().num_prefix_hit_tokens == 32
    # In a step of another length products may be summed in another order.
    assert cached[0][0] == computed[0][0]
    assert dtype != "float32" or agreement(cached, computed) >= ALIKE


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(DISTANCE))
def test_logits_are_near_those_of_plain_paddle(
    tmp_path: Path, cache_type: str, dtype: str, head_dim: int
) -> None:
    directory = model(tmp_path / "model", {"head_dim": head_dim})
    changes = {"cachekv_int8_type": cache_type}
    got = logits_of(directory, dtype=dtype, inference_model=True, **SETTINGS, **changes)
    wanted = logits_of(directory, dtype="float32", inference_model=False, **changes)
    # In int4, a code that tips over is a fifteenth of a row's extent.
    assert relative_error(got, wanted) < (0.15 if cache_type == "int4" else DISTANCE[dtype])


@pytest.mark.parametrize("dtype", list(DISTANCE))
def test_half_precision_graphs_equal_eager_steps(
    tmp_path: Path, cache_type: str, dtype: str
) -> None:
    directory = model(tmp_path / "model", {"head_dim": 64})
    changes = {"cachekv_int8_type": cache_type, "dtype": dtype, "batch_size": 3}
    texts = [
        greedy(change(LLM(config(directory, **SETTINGS, **changes)))) for change in FORMS.values()
    ]
    assert texts[0] == texts[1] == texts[2]
