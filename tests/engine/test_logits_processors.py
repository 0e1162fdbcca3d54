"""Logits processors and warpers equal Hugging Face transformers' (tests/golden/processors.npz)."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from predict.device import library
from predict.device.library import import_paddle
from predict.engine.choices import Row
from predict.engine.request_state import Request
from predict.engine.runner.host_chooser import HostChooser
from predict.engine.sampler import Sampler
from predict.ops import plain as reference
from predict.request import SamplingParams

paddle = import_paddle()

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "processors.npz")
CASES: list[dict[str, Any]] = json.loads(str(GOLDEN["cases"]))
EOS, NUM_PROMPT = int(GOLDEN["eos_token_id"]), int(GOLDEN["num_prompt"])
WARPERS = {"temperature", "top_k", "top_p", "min_p", "typical_p"}
NUM_DRAWS = 80


@pytest.fixture(params=["reference", "compiled"])
def backend(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "reference":
        return reference
    if library.find() is None:
        pytest.skip("no compiled operators; build them: python csrc/setup_cpu.py install")
    from predict.ops import compiled as ops

    return ops


def request_of(row: int, params: dict[str, Any], number: int = 0) -> Request:
    history = GOLDEN["history"][row].tolist()
    request = Request(number, history[:NUM_PROMPT], SamplingParams(**params))
    request.token_ids += history[NUM_PROMPT:]
    return request


def ids(case: dict[str, Any]) -> str:
    return str(case["name"])


@pytest.mark.parametrize("case", [c for c in CASES if set(c["params"]) - WARPERS], ids=ids)
def test_processed_logits_equal_transformers(case: dict[str, Any]) -> None:
    params = {k: v for k, v in case["params"].items() if k not in WARPERS}
    wanted = GOLDEN["scores"][CASES.index(case)]
    sampler, chooser = Sampler(0, (EOS,)), HostChooser(reference)
    rows = [Row(request_of(row, params, row)) for row in range(len(wanted))]
    got = chooser.adjusted(paddle.to_tensor(GOLDEN["logits"]), sampler.choices(rows)).numpy()
    if set(case["params"]) & WARPERS:  # a kept one is divided by the temperature there
        wanted = wanted * case["params"].get("temperature", 1.0)
        got = np.where(np.isfinite(wanted), got, wanted)
    np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_draws_follow_transformers_distribution(case: dict[str, Any], backend: ModuleType) -> None:
    """The token of each random number is the one of transformers' softmax, likeliest first."""
    sampler, chooser = Sampler(0, (EOS,)), HostChooser(backend)
    num_compared = 0
    for row, scores in enumerate(GOLDEN["scores"][CASES.index(case)]):
        order = np.argsort(-scores, kind="stable")
        sums = np.cumsum(np.exp(scores[order].astype(np.float64) - scores.max()))
        requests = [
            request_of(row, {"seed": seed, **case["params"]}, seed) for seed in range(NUM_DRAWS)
        ]
        logits = paddle.to_tensor(np.tile(GOLDEN["logits"][row], (NUM_DRAWS, 1)))
        tokens = chooser.tokens(logits, sampler.choices([Row(request) for request in requests]))
        assert np.isfinite(scores[tokens]).all()
        for request, token in zip(requests, tokens, strict=True):
            u = reference.uniform(request.request_id, request.num_output_tokens)
            place = int(np.argmax(sums > u * sums[-1]))
            if np.abs(sums - u * sums[-1]).min() > 1e-5 * sums[-1]:  # not on a border
                assert token == order[place]
                num_compared += 1
    assert num_compared > 0.95 * NUM_DRAWS * len(GOLDEN["logits"])


def test_draft_rows_see_the_drafts_before_them() -> None:
    """A row behind drafts is processed as if they were output."""
    params = {"no_repeat_ngram_size": 3, "bad_words": [[2, 12]], "repetition_penalty": 1.3}
    params |= {"frequency_penalty": 0.2, "min_length": 17}
    drafts = (2, 5, 2)
    sampler, chooser = Sampler(0, (EOS,)), HostChooser(reference)
    logits = paddle.to_tensor(GOLDEN["logits"][:4])
    behind = [Row(request_of(1, params), drafts[:count]) for count in range(4)]
    without = []
    for count in range(4):
        request = request_of(1, params, count)
        request.token_ids += drafts[:count]
        without.append(Row(request))
    got = chooser.adjusted(logits, sampler.choices(behind)).numpy()
    np.testing.assert_array_equal(got, chooser.adjusted(logits, sampler.choices(without)).numpy())
    assert np.isneginf(got[:, EOS]).tolist() == [True, True, False, False]
    assert np.isneginf(got[:, 12]).tolist() == [False, True, False, True]
