"""Speculation changes the speed of text and nothing else."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.config.speculation import STATES, known_methods
from predict.engine import kv_cache
from predict.engine.drafts import SpeculativeConfig, accepted_tokens
from predict.engine.request_state import Request
from predict.errors import UserError
from predict.speculative import proposer_of
from predict.speculative.inference_with_reference import (
    MOST_AT_ONCE,
    MOST_PLACES,
    NgramIndex,
    match_length,
)
from predict.speculative.lookahead import POOL_SIZE, NgramPool
from tests.support.drafts import METHODS, PROMPTS, draft_always
from tests.support.golden import config, golden
from tests.support.paths import DEMO


def test_right_drafts_stand_and_the_first_wrong_one_is_replaced() -> None:
    assert accepted_tokens([4, 5], [4, 5, 6]) == [4, 5, 6]
    assert accepted_tokens([4, 5], [4, 7, 6]) == [4, 7]
    assert accepted_tokens([4, 5], [1, 5, 6]) == [1]
    assert accepted_tokens([], [9]) == [9]


def test_the_place_with_the_longest_match_is_followed_and_the_last_of_equal_ones() -> None:
    def found(tokens: list[int]) -> int | None:
        index = NgramIndex(2)
        index.extend(tokens, len(tokens))
        return index.find(tokens, len(tokens))

    assert found([5, 1, 2, 7, 6, 1, 2, 8, 1, 2]) == 7  # both places have (1, 2) alone: the last
    assert found([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]) == 3
    assert found([5, 6, 7, 9, 6]) == 2  # 6 alone
    assert found([5, 6, 7, 9]) is None
    assert match_length([1, 2, 3, 1, 2], 2, 5) == 2


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("max_size", [1, 2, 3, 5])
def test_ngrams_are_found_however_the_text_grows(max_size: int, late: int) -> None:
    """Against a search through the text, at each of its tokens; the last ones may not be in yet."""
    tokens = np.random.default_rng(0).integers(0, 3, 80).tolist()
    index, grown = NgramIndex(max_size), 0
    for end in range(1, len(tokens) + 1):
        if end % 3 and end > 5:
            continue  # several tokens at once
        index.extend(tokens, end - late)
        lengths = {place: match_length(tokens, place, end) for place in range(1, end - late)}
        found = index.find(tokens, end)
        longest = max((min(length, max_size) for length in lengths.values()), default=0)
        if not longest:
            assert found is None
            continue
        places = [p for p in lengths if min(lengths[p], max_size) == longest]
        if longest == max_size:
            last = places[-MOST_PLACES:]
            longest = max(lengths[place] for place in last)
            places = [place for place in last if lengths[place] == longest]
        assert found == places[-1]
        grown += 1
    assert grown > 20


def test_tokens_on_their_way_are_not_part_of_the_text() -> None:
    for method in ("inference_with_reference", "lookahead"):
        proposer = proposer_of(SpeculativeConfig(method=method, max_ngram_size=2))
        request = Request(0, [1, 2, 3, 1, 2], SamplingParams())
        request.token_ids.append(-1)
        request.num_placeholders = 1
        proposer.propose([request], [1])
        proposer.settle()
        assert list(proposer.propose([request], [3])[0]) == [3, 1, 2]
        request.token_ids[-1] = 4
        request.num_placeholders = 0
        assert list(proposer.propose([request], [3])[0]) == []
        proposer.settle()
        request.token_ids += [3, 1, 2]
        assert list(proposer.propose([request], [1])[0]) == [4]


def test_the_pool_takes_in_a_steps_tokens_while_the_next_step_runs() -> None:
    proposer = proposer_of(SpeculativeConfig(method="lookahead", max_ngram_size=2))
    request = Request(0, [1, 2, 3, 1], SamplingParams())
    assert list(proposer.propose([request], [2])[0]) == []
    proposer.settle()
    assert list(proposer.propose([request], [2])[0]) == [2, 3]
    request.token_ids += [2, 4, 1, 2]
    proposer.observe(request, [6, 8, 9], [5, 7, 9, 3])  # 5 is the request's next token
    assert list(proposer.propose([request], [1])[0]) == [3]
    proposer.settle()
    assert list(proposer.propose([request], [1])[0]) == [4]
    request.token_ids.append(5)
    assert list(proposer.propose([request], [4])[0]) == [7, 9, 3, 1]


@pytest.mark.parametrize("method", ["inference_with_reference", "lookahead"])
def test_long_prompts_are_taken_in_piece_by_piece(method: str) -> None:
    proposer = proposer_of(SpeculativeConfig(method=method, max_ngram_size=3))
    prompt = list(range(3 * MOST_AT_ONCE - 10))
    long, short = (Request(i, p, SamplingParams()) for i, p in enumerate([prompt, [7, 8, 7]]))
    long.token_ids += [4, 5, 6]
    found: list[list[list[int]]] = []
    for _ in range(4):
        found.append(list(map(list, proposer.propose([long, short], [2, 1]))))
        proposer.settle()
    # The short one waits until a call has room for it.
    assert found == [[[], []], [[], []], [[7, 8], [8]], [[7, 8], [8]]]


def test_drafts_repeat_what_repeats() -> None:
    proposer = proposer_of(SpeculativeConfig(method="inference_with_reference", max_ngram_size=2))
    request = Request(0, [1, 2, 3, 1, 2], SamplingParams())
    other = Request(1, [4, 5], SamplingParams())
    assert list(map(list, proposer.propose([request, other], [5, 2]))) == [[3, 1, 2, 3, 1], []]
    assert list(map(list, proposer.propose([request], [1]))) == [[3]]
    proposer.forget(0)


def test_pool_follows_what_came_last() -> None:
    pool = NgramPool(2)
    pool.add([1, 2, 3, 1, 2, 4], 1, 6)
    assert pool.follow([7, 1, 2], 3, 3) == [4]
    assert pool.follow([3], 1, 3) == [1, 2, 4]


def test_pool_forgets_what_came_long_ago() -> None:
    pool = NgramPool(1)
    for start in range(0, 2 * POOL_SIZE, 1000):
        pool.add(range(start, start + 1001), 1, 1001)
    assert pool.follow([5], 1, 1) == []
    assert pool.follow([2 * POOL_SIZE - POOL_SIZE // 2], 1, 1) != []
    assert sum(map(len, pool._newer + pool._older)) <= POOL_SIZE + 1000


def texts(prompts: list[Any], params: Any, **changes: Any) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(config(DEMO, **{"max_length": 160, "attention": "append", **changes}))
    draft_always(llm)
    return [output.token_ids for output in llm.generate(prompts, params)], llm


@pytest.fixture
def unused_blocks_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = kv_cache.allocate_caches

    def filled(*arguments: Any) -> Any:
        caches = allocate(*arguments)
        for layer in caches:
            for tensor in layer:
                tensor.set_value(np.full(tensor.shape, np.nan, np.float32))
        return caches

    for module in ("build", "drafting"):
        monkeypatch.setattr(f"predict.{module}.allocate_caches", filled)


@pytest.mark.parametrize("method", [None, *METHODS])
def test_steps_count_the_tokens_that_came(method: str | None) -> None:
    changes = {"speculate_max_draft_token_num": 4, **METHODS[method]} if method else {}
    changes |= {"max_length": 160, "attention": "append", "inference_model": True}
    llm = LLM(config(DEMO, speculate_method=method, **changes))
    steps: list[tuple[int, int]] = []
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    llm.generate(PROMPTS, params, on_step=lambda *tokens: steps.append(tokens))
    num_prompt_tokens, num_output_tokens = map(sum, zip(*steps, strict=True))
    assert num_prompt_tokens == llm.stats().num_prompt_tokens
    assert num_output_tokens == 60 * len(PROMPTS)


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    {"temperature": 0.0, "repetition_penalty": 1.2, "min_length": 20},
    {"temperature": 0.6, "top_k": 5, "frequency_penalty": 0.2},
    {"temperature": 0.0, "no_repeat_ngram_size": 4, "bad_words": ["self", "import os"]},
    {"temperature": 0.0, "logit_bias": {10: 3.0, 32: -2.0}, "bad_words": [[11], [12, 13]]},
    {"temperature": 0.7, "typical_p": 0.6, "seed": 5, "presence_penalty": 0.3},
    {"temperature": 0.5, "min_p": 0.1, "seed": 6, "no_repeat_ngram_size": 6, "min_length": 9},
]
PARAMS = [
    SamplingParams(max_new_tokens=40 if index < len(PROMPTS) else 18, **kind)
    for index, kind in enumerate(KINDS)
]


def half_as_many(inference_model: bool) -> slice:
    """Of requests: plain operators take several times as long, and rules run beside them alike."""
    return slice(None) if inference_model else slice(0, None, 2)


@functools.cache
def without_drafts(batch_size: int, inference_model: bool) -> list[tuple[int, ...]]:
    which = half_as_many(inference_model)
    settings = {"batch_size": batch_size, "inference_model": inference_model}
    return texts((PROMPTS * 2)[which], PARAMS[which], **settings)[0]


@pytest.mark.usefixtures("unused_blocks_are_nan")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch_size", "inference_model"), [(1, True), (3, True), (3, False)])
def test_text_is_the_same_with_drafts(batch_size: int, method: str, inference_model: bool) -> None:
    which = half_as_many(inference_model)
    got, llm = texts(
        (PROMPTS * 2)[which],
        PARAMS[which],
        speculate_method=method,
        speculate_max_draft_token_num=5,
        batch_size=batch_size,
        inference_model=inference_model,
        **METHODS[method],
    )
    assert got == without_drafts(batch_size, inference_model)
    stats = llm.stats()
    assert 0 < stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("case", ["llama_gqa", "mistral_window", "qwen2"])
def test_goldens_with_drafts_preemption_and_chunks(case: str) -> None:
    expected = golden(case)
    llm = LLM(
        config(
            case,
            attention="append",
            batch_size=4,
            block_size=16,
            num_cache_blocks=10,
            max_num_batched_tokens=24,
            speculate_method="lookahead",
            speculate_max_draft_token_num=12,
        )
    )
    params = SamplingParams(max_new_tokens=len(expected["greedy"][0]), temperature=0.0)
    outputs = llm.generate(expected["prompts"], params)
    assert [list(output.token_ids) for output in outputs] == expected["greedy"]


def test_every_method_is_tested() -> None:
    assert sorted([*METHODS, *STATES]) == known_methods()


def test_bad_settings_are_refused_before_loading() -> None:
    with pytest.raises(UserError, match="draft_model, eagle, inference_with_reference, lookahead"):
        config(DEMO, speculate_method="dflash")
    with pytest.raises(UserError, match="1 to 15"):
        config(DEMO, speculate_method="lookahead", speculate_max_draft_token_num=16)
    with pytest.raises(UserError, match="a whole number from 1"):
        config(DEMO, speculate_method="lookahead", speculate_max_ngram_size=0)
