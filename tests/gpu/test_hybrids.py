"""Models with a state per request on the GPU: goldens in graphs and eager steps, cuts of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, EngineConfig, SamplingParams
from predict.device import devices
from tests.support.gpu_engines import FORMS, SETTINGS, runner_of
from tests.support.hybrids import (
    CASES,
    FOLDER,
    GOLDEN,
    LOGITS,
    PROMPTS,
    config,
    greedy,
    last_logits,
)

LOGIT_TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order
CHUNK_TOLERANCE = 0.03  # the same of bfloat16, in chunks and one by one
SMALL_STEPS = {"max_num_batched_tokens": 37, "batch_size": 2}


@pytest.mark.parametrize("form", ["graph", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_logits_and_text_equal_transformers(gpu: devices.Device, case: str, form: str) -> None:
    llm = FORMS[form](LLM(config(case, **SETTINGS)))
    wanted = LOGITS[f"{case}/logits"]
    found = last_logits(llm, PROMPTS)
    np.testing.assert_allclose(found, wanted, atol=LOGIT_TOLERANCE * np.abs(wanted).max(), rtol=0)
    for _ in range(2):
        assert greedy(llm, PROMPTS) == GOLDEN[case]
    assert llm.stats().num_prefix_hit_tokens == 64 + 192  # of 65, and of 200 tokens
    assert bool(runner_of(llm).graphs) == (form != "eager")


@pytest.mark.parametrize("case", ["qwen3_next", "lfm2"])
@pytest.mark.parametrize("changes", [SMALL_STEPS, {"attention": "reserved"}])
def test_how_steps_are_cut_changes_nothing(
    gpu: devices.Device, case: str, changes: dict[str, Any]
) -> None:
    llm = LLM(config(case, **{**SETTINGS, **changes}))
    for _ in range(2):
        assert greedy(llm, PROMPTS) == GOLDEN[case]


def wide(folder: Path, **changes: Any) -> EngineConfig:
    """Random weights, and heads of 128 keys and values: those that have kernels of their own."""
    sizes = {
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "hidden_size": 128,
        "head_dim": 64,
    }
    values = json.loads((FOLDER / "qwen3_5_text" / "config.json").read_text()) | sizes
    (folder / "config.json").write_text(json.dumps(values))
    settings = {"dtype": "bfloat16", "load_format": "dummy", **SETTINGS, **changes}
    return config(folder, **settings)


def test_chunks_of_tokens_make_what_single_ones_make(
    gpu: devices.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(wide(tmp_path))
    chunks = last_logits(llm, PROMPTS)
    assert np.isfinite(chunks).all()
    for way in ("steps", "any"):
        monkeypatch.setenv("REGATTA_KERNEL", f"delta_net={way}")
        tolerance = CHUNK_TOLERANCE * np.abs(chunks).max()
        np.testing.assert_allclose(last_logits(llm, PROMPTS), chunks, atol=tolerance, rtol=0)


def test_batch_invariant_answers_have_the_same_bits(gpu: devices.Device, tmp_path: Path) -> None:
    """Alone, together, in small steps, from the cache, and preempted."""
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True, logprobs=1)
    found = []
    for changes in (
        {"batch_size": 1},
        {},
        {"max_num_batched_tokens": 80},
        {"num_cache_blocks": 9, "batch_size": 5},
    ):
        llm = LLM(wide(tmp_path, batch_invariant=True, **changes))
        for _ in range(2):
            outputs = llm.generate(PROMPTS, params)
            found.append([(each.token_ids, each.outputs[0].logprobs) for each in outputs])
    assert llm.stats().num_preemptions > 0
    assert all(each == found[0] for each in found[1:])
