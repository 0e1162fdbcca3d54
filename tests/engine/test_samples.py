"""n, best_of and logprobs: what comes back of a prompt, and what it costs."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.engine import queue as queue_module
from predict.engine.batch import span_inputs
from predict.engine.logprobs import LogprobRecord, measure
from predict.engine.queue import MAX_PROMPT_LOGITS, waits_for_leader
from predict.engine.request_state import Request
from predict.engine.samples import Samples, sample_params
from predict.engine.scheduled import SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.request import MAX_LOGPROBS, TokenLogprobs
from tests.support import scheduler_traffic
from tests.support.demo import demo_config
from tests.support.golden import step_logits
from tests.support.texts import PROMPTS

SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_new_tokens=12)
DRAFTS = {
    "speculate_method": "lookahead",
    "speculate_max_draft_token_num": 6,
    "speculate_max_ngram_size": 3,
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(demo_config())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n 0 is not supported .*from 1 to 1024"),
        ({"n": 1025}, "n 1025 is not supported .*from 1 to 1024"),
        ({"n": 3, "best_of": 2}, "best_of 2 is less than n 3"),
        ({"logprobs": -1}, "logprobs -1 .*from 0 to 20, or None"),
        ({"prompt_logprobs": 21}, "prompt_logprobs 21 .*from 0 to 20, or None"),
        ({"logprobs": True}, "logprobs True"),
        ({"include_stop_str_in_output": 1}, "True, False"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**values)


def test_each_sample_is_what_its_seed_gives_alone(llm: LLM) -> None:
    (output,) = llm.generate(PROMPTS[:1], replace(SAMPLED, n=5))
    assert [each.index for each in output.outputs] == [0, 1, 2, 3, 4]
    assert len({each.token_ids for each in output.outputs}) > 1
    assert (output.text, output.token_ids) == (output.outputs[0].text, output.outputs[0].token_ids)
    for index, each in enumerate(output.outputs):
        (alone,) = llm.generate(PROMPTS[:1], replace(SAMPLED, seed=7 + index))
        assert (alone.token_ids, alone.text) == (each.token_ids, each.text)
        assert sample_params(replace(SAMPLED, n=5), index) == replace(SAMPLED, seed=7 + index)


def test_the_prompt_of_several_samples_is_computed_once() -> None:
    llm = LLM(demo_config(max_num_batched_tokens=40))
    prompt = list(range(100, 200))
    llm.generate([prompt], replace(SAMPLED, n=4, max_new_tokens=3))
    stats = llm.stats()
    assert stats.num_prompt_tokens == 400
    assert stats.num_prefix_hit_tokens == 3 * 96  # all whole blocks
    assert llm.engine.scheduler.stats.num_scheduled_tokens == 100 + 3 * 4 + 4 * 2


def test_samples_stream_side_by_side(llm: LLM) -> None:
    params = replace(SAMPLED, n=3)
    outputs = llm.generate(PROMPTS[:2], params)
    texts = {(p, i): "" for p in range(2) for i in range(3)}
    ends = []
    for piece in llm.stream(PROMPTS[:2], params):
        texts[piece.prompt_index, piece.index] += piece.text
        if piece.finish_reason is not None:
            ends.append((piece.prompt_index, piece.index))
    assert sorted(ends) == sorted(texts)
    for (prompt, index), text in texts.items():
        assert outputs[prompt].outputs[index].text == text


def test_best_of_returns_the_likeliest_samples_the_best_first(llm: LLM) -> None:
    (all_of_them,) = llm.generate(PROMPTS[:1], replace(SAMPLED, n=6, logprobs=0))
    (best,) = llm.generate(PROMPTS[:1], replace(SAMPLED, n=2, best_of=6))
    ranked = sorted(
        all_of_them.outputs, key=lambda each: each.cumulative_logprob or 0.0, reverse=True
    )
    assert [each.text for each in best.outputs] == [each.text for each in ranked[:2]]
    assert [each.index for each in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None
    assert best.outputs[0].cumulative_logprob == pytest.approx(ranked[0].cumulative_logprob)
    with pytest.raises(UserError, match="cannot be streamed"):
        next(llm.stream(PROMPTS[0], replace(SAMPLED, best_of=2)))


# --- logprobs ---


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 20), st.booleans())
def test_measured_logprobs_are_the_softmax(
    seed: int, vocab_size: int, num_top: int, coarse: bool
) -> None:
    generator = np.random.default_rng(seed)
    logits = (generator.standard_normal((3, vocab_size)) * 5).astype(np.float32)
    if coarse:
        logits = np.round(logits / 4)  # many ties
    logits[0, 0] = -np.inf
    tokens = generator.integers(0, vocab_size, 3)
    if vocab_size == 1:
        logits[0, 0] = 1
    table = measure(logits, tokens.tolist(), num_top)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(table.logprobs, expected[range(3), tokens], atol=1e-5)
    for row in range(3):
        order = np.argsort(-logits[row], kind="stable")[:num_top]
        assert table.top_token_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(table.top_logprobs[row], expected[row][order], atol=1e-5)
        assert table.ranks[row] == 1 + (logits[row] > logits[row, tokens[row]]).sum()


@pytest.fixture(scope="module")
def oracle() -> LLM:
    """Runs steps of its own, over blocks that nothing else uses."""
    return LLM(demo_config())


@functools.cache
def reference(llm: LLM, token_ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """float64 logprobs [T, V] behind each token, all in one step."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=1,
            max_num_batched_tokens=512,
            max_length=256,
            block_size=16,
            num_blocks=16,
        )
    )
    request = Request(0, list(token_ids), SamplingParams())
    request.logprobs = LogprobRecord(None, 0, len(token_ids))
    scheduler.add(request)
    batch = scheduler.schedule()
    assert batch is not None
    logits = step_logits(llm, span_inputs(batch.spans, 16)).astype(np.float64)
    # The last token's row comes first, and a row that nobody wants behind the others.
    logits = np.roll(logits[: len(token_ids)], -1, axis=0)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def check(
    entries: tuple[TokenLogprobs | None, ...] | None,
    expected: np.ndarray[Any, Any],
    token_ids: tuple[int, ...],
    num_top: int,
) -> None:
    assert entries is not None
    assert len(entries) == len(token_ids)
    for entry, row, token_id in zip(entries, expected, token_ids, strict=True):
        assert entry is not None
        assert next(iter(entry)) == token_id
        top = np.argsort(-row, kind="stable")[:num_top]
        assert set(entry) == {token_id, *top.tolist()}
        for token, (logprob, rank) in entry.items():
            assert logprob == pytest.approx(row[token], abs=2e-4)
            assert rank == 1 + (row > row[token]).sum()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_num_batched_tokens": 5},
        {"chunked_prefill": False},
        {"attention": "block"},
        {"attention": "reserved"},
        {"num_cache_blocks": 17},
        DRAFTS,
    ],
)
def test_logprobs_are_those_of_a_plain_run_over_the_whole_text(
    oracle: LLM, changes: dict[str, Any]
) -> None:
    llm = LLM(demo_config(**changes))
    prompts = [list(range(100, 170)), list(range(100, 133)), [300, 301, 300, 301, 300, 301], [7]]
    params = [
        SamplingParams(temperature=0.8, seed=3, max_new_tokens=12, logprobs=4, prompt_logprobs=2),
        SamplingParams(temperature=0.0, max_new_tokens=9, prompt_logprobs=0, presence_penalty=9.0),
        SamplingParams(temperature=0.0, max_new_tokens=20, logprobs=20, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, max_new_tokens=3, logprobs=0, prompt_logprobs=20),
    ]
    for _ in range(2):  # the second time over a warm prefix cache
        outputs = llm.generate(prompts, params)
        for prompt, param, output in zip(prompts, params, outputs, strict=True):
            expected = reference(oracle, (*prompt, *output.token_ids))
            first = output.outputs[0]
            assert (first.logprobs is None) == (param.logprobs is None)
            if param.logprobs is not None:
                rows = expected[len(prompt) - 1 : -1]
                check(first.logprobs, rows, first.token_ids, param.logprobs)
                total = sum(row[token] for row, token in zip(rows, first.token_ids, strict=True))
                assert first.cumulative_logprob == pytest.approx(total, abs=1e-2)
            assert (output.prompt_logprobs is None) == (param.prompt_logprobs is None)
            if param.prompt_logprobs is not None and output.prompt_logprobs is not None:
                assert output.prompt_logprobs[0] is None
                rest = output.prompt_logprobs[1:]
                rows = expected[: len(prompt) - 1]
                check(rest, rows, tuple(prompt[1:]), param.prompt_logprobs)
    assert llm.stats().num_used_blocks == 0


def test_an_exported_program_measures_the_same(oracle: LLM, tmp_path: Path) -> None:
    export_model(oracle.config, tmp_path)
    static = LLM(oracle.config.changed(model_name_or_path=str(tmp_path), mode="static"))
    params = SamplingParams(temperature=0.0, max_new_tokens=4, logprobs=2, prompt_logprobs=1)
    (got,), (wanted,) = (each.generate([list(range(40, 60))], params) for each in (static, oracle))
    assert got.token_ids == wanted.token_ids
    for ours, theirs in (
        (got.prompt_logprobs, wanted.prompt_logprobs),
        (got.outputs[0].logprobs, wanted.outputs[0].logprobs),
    ):
        assert ours is not None
        assert theirs is not None
        for entry, expected in zip(ours, theirs, strict=True):
            assert (entry or {}).keys() == (expected or {}).keys()
            for token, (logprob, rank) in (entry or {}).items():
                assert expected is not None
                assert expected[token].rank == rank
                assert expected[token].logprob == pytest.approx(logprob, abs=1e-4)


def test_a_stopped_request_has_as_many_logprobs_as_tokens() -> None:
    llm = LLM(demo_config(**DRAFTS))
    whole = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True, logprobs=1)
    (long,) = llm.generate(PROMPTS[:1], whole)
    (output,) = llm.generate(PROMPTS[:1], replace(whole, stop=long.text[20:24]))
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    assert len(logprobs) == len(output.token_ids) < len(long.token_ids)
    assert [next(iter(entry)) for entry in logprobs] == list(output.token_ids)


def test_prompts_with_logprobs_bound_a_steps_logits() -> None:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=4096,
            max_length=1024,
            block_size=16,
            num_blocks=300,
            chunked_prefill=False,
        )
    )
    requests = [Request(i, [i] * 600, SamplingParams(max_new_tokens=1)) for i in range(3)]
    for request in requests:
        request.logprobs = LogprobRecord(None, MAX_LOGPROBS, 600)
        scheduler.add(request)
    seen = []
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        assert batch is not None
        seen.append(sum(span.num_prompt_logits for span in batch.spans))
        scheduler.update(batch, [5] * batch.num_samples)
    assert max(seen) <= MAX_PROMPT_LOGITS
    assert sum(seen) == 3 * 599


def test_samples_wait_for_the_first_ones_blocks_only(llm: LLM) -> None:
    def samples(num_tokens: int) -> Samples:
        ids = iter(range(9))
        return Samples([5] * num_tokens, replace(SAMPLED, n=3), lambda: next(ids), None, None)

    for num_tokens, first_step in ((16, 3), (17, 1)):
        scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=4,
                max_num_batched_tokens=64,
                max_length=64,
                block_size=16,
                num_blocks=32,
            )
        )
        for request in samples(num_tokens).requests:
            scheduler.add(request)
        batch = scheduler.schedule()
        assert batch is not None
        assert len(batch.spans) == first_step  # a prompt without a block to share waits for none
        scheduler.abort(0)  # the others do not wait for one that is gone
        scheduler.update(batch, [5] * batch.num_samples)
        batch = scheduler.schedule()
        assert batch is not None
        assert [span.request.request_id for span in batch.spans] == [1, 2]


class GroupSimulation(scheduler_traffic.Simulation):
    """Prompts come several times in a row, as samples do, and some want their logprobs."""

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        first = len(self.requests)
        for _ in range(self.rng.choice([1, 1, 2, 4])):
            super().add(prompt, params)
        for request_id in range(first, len(self.requests)):
            request = self.requests[request_id]
            if request_id > first:
                request.leader = self.requests[first]
            elif self.rng.random() < 0.4:
                request.logprobs = LogprobRecord(None, 0, len(prompt))

    def _check_turn(self, waits: bool, what: str) -> None:
        going = (
            r for r in self.unfinished.values() if not scheduler_traffic.awaits_its_last_token(r)
        )
        oldest = min(going, key=lambda request: request.arrival_index, default=None)
        # A sample may wait for the step that computes its prompt, while others go on.
        if oldest is None or not waits_for_leader(oldest, self.limits.block_size):
            # Two requests may be the oldest, and wait, in turn.
            super()._check_turn(waits, f"{what} {oldest and oldest.request_id}")


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", ["plain", "drafts", "ahead"])
def test_samples_and_prompt_logprobs_keep_the_schedulers_promises(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_module, "MAX_PROMPT_LOGITS", 7)
    num_hits = 0
    for seed in range(60):
        rng = random.Random(seed)
        limits = scheduler_traffic.config(
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(6, 30),
            max_length=32,
            block_size=rng.choice([1, 4, 5]),
            num_blocks=rng.randint(32, 60),
            reserve_full=rng.random() < 0.2,
            prefix_caching=rng.random() < 0.8,
            chunked_prefill=rng.random() < 0.7,
            separate_steps=rng.random() < 0.3,
        )
        simulation = scheduler_traffic.run_random(
            limits, seed, 60, mode == "drafts", mode == "ahead", kind=GroupSimulation
        )
        num_hits += simulation.scheduler.stats.num_prefix_hit_tokens
    assert num_hits > 4000
