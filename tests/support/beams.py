"""Golden beam searches of Hugging Face transformers, and checks of a run."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.request import RequestOutput, TokenLogprobs
from tests.support.golden import GOLDEN, golden

SCORE_TOLERANCE = 2e-3  # float32 sums in another order, of some twenty tokens


@functools.cache
def searches(name: str) -> list[dict[str, Any]]:
    found = json.loads((GOLDEN / "beams.json").read_text())["searches"]
    return [search for search in found if search["model"].endswith(name)]


def params_of(search: dict[str, Any]) -> SamplingParams:
    names = ("num_beams", "length_penalty", "early_stopping")
    return SamplingParams(
        max_new_tokens=search["max_new_tokens"],
        min_length=search["min_new_tokens"],
        repetition_penalty=search["repetition_penalty"],
        stop_token_ids=search["eos"],
        ignore_eos=True,
        n=search["num_return_sequences"],
        **{name: search[name] for name in names},
    )


def check(output: RequestOutput, search: dict[str, Any]) -> None:
    assert [list(answer.token_ids) for answer in output.outputs] == search["sequences"]
    scores: list[Any] = [answer.score for answer in output.outputs]
    np.testing.assert_allclose(scores, search["scores"], atol=SCORE_TOLERANCE, rtol=0)
    assert output.token_ids == output.outputs[0].token_ids
    for answer in output.outputs:
        ended = answer.token_ids[-1] in search["eos"]
        assert answer.finish_reason == ("stop" if ended else "length")


def check_all(llm: LLM, name: str, step: int = 1) -> None:
    """Every golden search, or each of `step`, in one call, so that they share the batch."""
    wanted = searches(name)[::step]
    params = [params_of(search) for search in wanted]
    outputs = llm.generate([search["prompt"] for search in wanted], params)
    for output, search in zip(outputs, wanted, strict=True):
        check(output, search)
    assert llm.stats().num_used_blocks == 0


def check_neighbours(llm: LLM) -> None:
    """Greedy, measured and seeded requests beside searches answer as alone, and so do these."""
    expected, wanted = golden("llama_gqa"), searches("llama_gqa")[::7]
    prompt = expected["prompts"][3]
    drawn = SamplingParams(max_new_tokens=12, seed=5, top_k=20, repetition_penalty=1.2)
    measured = replace(drawn, logprobs=2, prompt_logprobs=1, no_repeat_ngram_size=3)
    alone = llm.generate([prompt], drawn)[0].token_ids
    measured_alone = llm.generate([prompt], measured)[0]
    num_new = len(expected["greedy"][0])
    plain = SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True)
    prompts: list[Sequence[int]] = []
    params: list[SamplingParams] = []
    for index, search in enumerate(wanted):
        prompts += [search["prompt"], expected["prompts"][index % 5], prompt, prompt]
        params += [params_of(search), plain, drawn, measured]
    outputs = llm.generate(prompts, params)
    for index, search in enumerate(wanted):
        check(outputs[4 * index], search)
        assert list(outputs[4 * index + 1].token_ids) == expected["greedy"][index % 5]
        assert outputs[4 * index + 2].token_ids == alone
        found = outputs[4 * index + 3].outputs[0]
        assert found.token_ids == measured_alone.token_ids
        assert values_of(found.logprobs) == pytest.approx(
            values_of(measured_alone.outputs[0].logprobs), abs=1e-3
        )
        assert values_of(outputs[4 * index + 3].prompt_logprobs) == pytest.approx(
            values_of(measured_alone.prompt_logprobs), abs=1e-3
        )
    assert llm.stats().num_used_blocks == 0


def values_of(tokens: Sequence[TokenLogprobs | None] | None) -> list[float]:
    """The logprobs of tokens, and of the likeliest ones beside each."""
    assert tokens
    return [entry.logprob for token in tokens if token for entry in token.values()]
