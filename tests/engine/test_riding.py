"""Texts in the steps of answers: neither changes, nothing is held, and neither waits for ever."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.engine.embedding import Text, VectorJob
from predict.engine.samples import Samples
from predict.errors import EngineError
from predict.nn.pooling import Dense
from tests.support.vectors import IDS, llm_of, nothing_is_held

SIZES: dict[str, Any] = {"max_num_batched_tokens": 100, "block_size": 16, "prefix_caching": False}
# In one step, in several ones, and more of them than a step takes.
TEXTS = [Text(ids) for ids in (*IDS, list(range(5, 405)), *([7 + n] * 30 for n in range(20)))]


def params(num_tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def answering(llm: LLM, count: int = 3, num_tokens: int = 40) -> tuple[list[Samples], list[Any]]:
    """Answers that run, and what is told of their ends."""
    told: list[Any] = []
    groups = [llm.samples([5, 6, 7 + n], params(num_tokens)) for n in range(count)]
    llm.answers.add(groups, lambda news: told.append(news) if news.is_last else None)
    llm.step()
    return groups, told


def turn(llm: LLM) -> list[VectorJob]:
    """As a loop of answers and texts goes on; the jobs that have ended."""
    if llm.answers.is_busy:
        llm.step()
    return llm.embedder.step() if llm.embedder.is_busy else []


def no_round(*_: Any) -> None:
    raise AssertionError("a round ran beside answers")


@pytest.mark.parametrize("pooling", ["last", "mean", "cls", "weightedmean", "max"])
def test_texts_ride_in_the_steps_of_answers_and_neither_changes(
    pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of("qwen3_embedding", **SIZES)
    pooler = llm.retrieval.pooler(pooling)
    wanted = llm.run_texts(TEXTS, pooler, None)
    alone = [llm.generate([[5, 6, 7 + n]], params())[0].outputs[0].token_ids for n in range(3)]
    monkeypatch.setattr(llm.engine.runner, "run", no_round)
    before = llm.engine.stats.num_scheduled_tokens
    groups, _ = answering(llm)
    jobs = [llm.add_texts(TEXTS[:9], pooler, None), llm.add_texts(TEXTS[9:], pooler, None)]
    ended, num_steps = list[VectorJob](), 0
    while len(ended) < 2:
        ended += turn(llm)
        num_steps += 1
    num_tokens = sum(len(text.token_ids) for text in TEXTS)
    assert num_steps == -(-num_tokens // (100 - 3))  # no room is left in any step
    assert ended == jobs
    np.testing.assert_array_equal(np.concatenate([job.vectors for job in jobs]), wanted)
    while llm.answers.is_busy:
        llm.step()
    assert [group.output().outputs[0].token_ids for group in groups] == alone
    computed = llm.engine.stats.num_scheduled_tokens - before
    assert computed == num_tokens + 3 * (3 + 40 - 1)
    assert nothing_is_held(llm)


def test_a_long_text_gives_its_blocks_to_answers_and_none_is_preempted() -> None:
    llm = llm_of("qwen3_embedding", **{**SIZES, "num_cache_blocks": 36, "batch_size": 4})
    pooler = llm.retrieval.pooler("mean")
    wanted = llm.run_texts([Text([9] * 480)], pooler, None)
    _, told = answering(llm, 2, 60)
    job = llm.add_texts([Text([9] * 480)], pooler, None)
    turn(llm)
    assert llm.embedder._begun is not None
    _, others = answering(llm, 2, 60)  # two blocks are left then, for four answers
    while not job.is_finished:
        turn(llm)
    np.testing.assert_array_equal(job.vectors, wanted)
    while llm.answers.is_busy:
        llm.step()
    assert len(told) == len(others) == 2
    assert llm.engine.stats.num_preemptions == 0
    assert nothing_is_held(llm)


@pytest.mark.parametrize("fails_alone", [False, True])
def test_a_text_that_fails_a_step_ends_alone(
    monkeypatch: pytest.MonkeyPatch, fails_alone: bool
) -> None:
    llm = llm_of("qwen3_embedding", **SIZES)
    pooler = llm.retrieval.pooler("mean")
    wanted = llm.run_texts([Text([9] * 30)], pooler, None)
    alone = [llm.generate([[5, 6, 7 + n]], params())[0].outputs[0].token_ids for n in range(3)]
    groups, _ = answering(llm)
    network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
    run = network.run

    def failing(inputs: Any, taps: Any) -> Any:
        if 77 in inputs.token_ids and (fails_alone or len(inputs.context_lens) > 2):
            raise RuntimeError("token 77")
        return run(inputs, taps)

    monkeypatch.setattr(network, "run", failing)
    good = llm.add_texts([Text([9] * 30)], pooler, None)
    bad = llm.add_texts([Text([77] * 30)], pooler, None)
    while llm.answers.is_busy or llm.embedder.is_busy:
        turn(llm)
    np.testing.assert_array_equal(good.vectors, wanted)
    assert ("token 77" in str(bad.error)) == fails_alone
    assert (bad.vectors is None) == fails_alone
    assert [group.output().outputs[0].token_ids for group in groups] == alone
    assert nothing_is_held(llm)


def test_hidden_states_that_are_no_numbers_end_the_job_and_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = llm_of("qwen3_embedding", **SIZES)
    network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
    run = network.run

    def broken(inputs: Any, taps: Any) -> Any:
        outputs = run(inputs, taps)
        if taps:
            outputs.hidden["norm"][-1] = float("nan")
        return outputs

    monkeypatch.setattr(network, "run", broken)
    groups, _ = answering(llm)
    job = llm.add_texts([Text([9] * 30), Text([8])], llm.retrieval.pooler("mean"), None)
    while llm.answers.is_busy:
        turn(llm)
    with pytest.raises(EngineError, match="prompt 1 has hidden states that are no finite numbers"):
        raise job.error or AssertionError
    assert all(group.output().outputs[0].finish_reason == "length" for group in groups)
    assert nothing_is_held(llm)


def test_prompts_that_fill_every_step_hold_no_text_back() -> None:
    llm = llm_of("qwen3_embedding", **{**SIZES, "batch_size": 4})
    job, num_turns = llm.add_texts([Text([9] * 30)], llm.retrieval.pooler("mean"), None), 0
    while not job.is_finished:
        groups = [llm.samples([5 + n] * 200, params(2)) for n in range(2)]
        llm.answers.add(groups, lambda news: None)
        turn(llm)
        num_turns += 1
    assert num_turns == 1  # a round ran behind the step


@pytest.mark.parametrize("when", ["waiting", "begun"])
def test_a_job_is_dropped_wherever_it_stands(when: str) -> None:
    llm = llm_of("qwen3_embedding", **SIZES)
    answering(llm)
    pooler = llm.retrieval.pooler("mean")
    job = llm.add_texts([Text([9] * 30), Text([9] * 300)], pooler, None)
    other = llm.add_texts([Text([8] * 200)], pooler, None)
    for _ in range(when == "begun"):
        turn(llm)
    llm.embedder.abort(job)
    while llm.answers.is_busy or llm.embedder.is_busy:
        turn(llm)
    assert job.vectors is None
    assert other.vectors is not None
    assert nothing_is_held(llm)


def test_scores_by_the_answers_yes_and_no_run_beside_answers() -> None:
    llm = llm_of("qwen3_reranker", **SIZES)
    pooler, text = llm.retrieval.score_pooler(), [Text(IDS[0]), Text(IDS[1])]
    wanted = llm.run_texts(text, pooler, None)
    groups, _ = answering(llm)
    job = llm.add_texts(text, pooler, None)
    while llm.answers.is_busy or llm.embedder.is_busy:
        turn(llm)
    np.testing.assert_array_equal(job.vectors, wanted)
    assert all(group.is_finished for group in groups)
    assert nothing_is_held(llm)


@pytest.mark.parametrize("seed", range(3))
def test_mixed_traffic_loses_no_block_and_no_text(seed: int) -> None:
    sizes = {**SIZES, "num_cache_blocks": 40, "prefix_caching": seed > 0, "batch_size": 4}
    llm, dice = llm_of("qwen3_embedding", **sizes), random.Random(seed)
    wanted: dict[tuple[int, int, str], Any] = {}
    jobs: list[tuple[VectorJob, tuple[int, int, str]]] = []
    num_ended = 0
    for _ in range(120):
        if dice.random() < 0.5:
            key = dice.randrange(5, 15), dice.choice([1, 20, 90, 250, 500]), "last"
            key = (*key[:2], dice.choice(["last", "mean"]))
            pooler = llm.retrieval.pooler(key[2])
            jobs.append((llm.add_texts([Text([key[0]] * key[1])], pooler, None), key))
        if dice.random() < 0.3:
            samples = llm.samples([dice.randrange(5, 15)] * dice.choice([2, 50]), params(30))
            llm.answers.add([samples], lambda news: None)
            if dice.random() < 0.3:
                llm.answers.abort(samples)
        if jobs and dice.random() < 0.1:
            llm.embedder.abort(jobs.pop(dice.randrange(len(jobs)))[0])
        turn(llm)
    while llm.answers.is_busy or llm.embedder.is_busy:
        num_ended += len(turn(llm))
    plain = llm_of("qwen3_embedding", **SIZES)
    for job, key in jobs:
        if key not in wanted:
            wanted[key] = plain.embed([[key[0]] * key[1]], key[2])
        np.testing.assert_array_equal(job.vectors, wanted[key])
    assert len(jobs) > 30
    assert nothing_is_held(llm)


def test_a_vector_that_cannot_be_made_ends_its_job_alone() -> None:
    llm = llm_of("qwen3_embedding", **SIZES)
    pooler = llm.retrieval.pooler("mean")
    wrong = replace(pooler, layers=(Dense(np.zeros((2, 3), np.float32)),))
    texts = [Text([9] * 30)]
    wanted = llm.run_texts(texts, pooler, None)
    answering(llm)
    jobs = [llm.add_texts(texts, each, None) for each in (pooler, wrong, pooler)]
    while llm.answers.is_busy or llm.embedder.is_busy:
        turn(llm)
    assert [job.error is None for job in jobs] == [True, False, True]
    for job in jobs[::2]:
        np.testing.assert_array_equal(job.vectors, wanted)
    assert nothing_is_held(llm)


def test_an_answer_that_fails_beside_a_text_that_has_begun_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = llm_of("qwen3_embedding", **SIZES)
    groups, _ = answering(llm)
    network: Any = llm.engine.runner.network  # type: ignore[attr-defined]
    run = network.run

    def failing(inputs: Any, taps: Any) -> Any:
        if 77 in inputs.token_ids:
            raise RuntimeError("token 77")
        return run(inputs, taps)

    monkeypatch.setattr(network, "run", failing)
    job = llm.add_texts([Text([9] * 400)], llm.retrieval.pooler("mean"), None)
    turn(llm)
    bad = llm.samples([77] * 100, params())  # which leaves no room in its step
    llm.answers.add([bad], lambda news: None)
    assert llm.embedder._begun is not None
    while llm.answers.is_busy or llm.embedder.is_busy:
        turn(llm)
    ends = [each.output().outputs[0].finish_reason for each in [*groups, bad]]
    assert ends == ["length", "length", "length", "error"]
    assert job.vectors is not None
    assert nothing_is_held(llm)


def test_a_text_goes_on_where_the_answers_of_its_step_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = llm_of("qwen3_embedding", **SIZES)
    groups, _ = answering(llm)
    monkeypatch.setattr(llm.engine.runner, "num_ahead", 1)  # the next step is launched ahead
    jobs = [llm.add_texts([Text([9] * n)], llm.retrieval.pooler("mean"), None) for n in (120, 40)]
    llm.step()
    assert llm.embedder._riding
    for group in groups:
        llm.answers.abort(group)
    while llm.answers.is_busy or llm.embedder.is_busy:
        turn(llm)
    assert all(job.vectors is not None for job in jobs)
    assert nothing_is_held(llm)
