"""The scheduler against a simulated model and cache.

The model's next token is a function of all tokens before it, and the "keys and values" of a token
are the hash of its prefix. So a span that reads a wrong slot, a lost token or a stale block shows
as a different hash.
"""

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.engine.beams import Candidates, likeliest, num_candidates
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduler import ScheduledBatch, Scheduler, SchedulerConfig
from predict.errors import UserError
from predict.request import FinishReason, SamplingParams

EOS = (0,)
VOCAB = 7
WAITING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def config(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_length: int = 32,
    block_size: int = 4,
    num_blocks: int = 32,
    reserve_full: bool = False,
    prefix_caching: bool = True,
    chunked_prefill: bool = True,
    separate_steps: bool = False,
) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_length=max_length,
        block_size=block_size,
        num_blocks=num_blocks,
        reserve_full=reserve_full,
        prefix_caching=prefix_caching,
        chunked_prefill=chunked_prefill,
        separate_steps=separate_steps,
    )


def request(request_id: int, prompt: Sequence[int], max_new_tokens: int = 4) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return Request(request_id, prompt, params)


def scheduled(batch: ScheduledBatch | None) -> list[tuple[int, int, int]]:
    """(request id, start, num_tokens) of each span."""
    assert batch is not None
    return [(span.request.request_id, span.start, span.num_tokens) for span in batch.spans]


def step(scheduler: Scheduler, token_id: int = 5) -> list[tuple[int, int, int]]:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [token_id] * batch.num_samples, EOS)
    return scheduled(batch)


# --- admission ---


def test_nothing_to_do_is_none() -> None:
    scheduler = Scheduler(config())
    assert scheduler.schedule() is None
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs 0"),
        ({"num_blocks": 0}, "num_blocks 0"),
        ({"block_size": -1}, "block_size -1"),
        ({"max_length": 1}, "max_length 1"),
        ({"max_num_batched_tokens": 3}, "max_num_batched_tokens 3 is less than max_num_seqs 4"),
    ],
)
def test_limits_that_cannot_work_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**values)  # type: ignore[arg-type]


def test_a_request_larger_than_the_cache_is_refused_with_numbers() -> None:
    scheduler = Scheduler(config(num_blocks=3))
    scheduler.add(request(0, [1] * 8, max_new_tokens=4))
    with pytest.raises(ValueError, match="request 1: 8 prompt tokens and up to 5 output") as error:
        scheduler.add(request(1, [1] * 8, max_new_tokens=5))
    assert "need 4 cache blocks of 4 tokens, the cache has 3" in str(error.value)
    assert "(allowed: 12 tokens in all)" in str(error.value)


def test_a_prompt_as_long_as_max_length_is_refused() -> None:
    scheduler = Scheduler(config())
    with pytest.raises(ValueError, match="request 0: the prompt has 32 tokens"):
        scheduler.add(request(0, [1] * 32))
    assert not scheduler.has_unfinished()


def test_an_id_in_use_and_a_second_add_are_refused() -> None:
    scheduler = Scheduler(config())
    first = request(0, [1], max_new_tokens=1)
    scheduler.add(first)
    with pytest.raises(ValueError, match="request id 0 is in use"):
        scheduler.add(request(0, [1]))
    step(scheduler)
    with pytest.raises(ValueError, match="was added before"):
        scheduler.add(first)
    scheduler.add(request(0, [1]))


def test_requests_enter_in_arrival_order_up_to_max_num_seqs() -> None:
    scheduler = Scheduler(config(max_num_seqs=2))
    for i in range(4):
        scheduler.add(request(i, [1, 2, 3]))
    assert scheduled(scheduler.schedule()) == [(0, 0, 3), (1, 0, 3)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 2)


def test_a_finished_request_is_replaced_at_the_next_step() -> None:
    scheduler = Scheduler(config(max_num_seqs=2))
    for i, num_new in enumerate((1, 3, 2)):
        scheduler.add(request(i, [i, i, i], max_new_tokens=num_new))
    assert step(scheduler) == [(0, 0, 3), (1, 0, 3)]
    assert step(scheduler) == [(1, 3, 1), (2, 0, 3)]


def test_reserve_full_takes_all_blocks_at_admission() -> None:
    scheduler = Scheduler(config(num_blocks=8, reserve_full=True))
    first, second = request(0, [1], max_new_tokens=15), request(1, [1], max_new_tokens=31)
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == [(0, 0, 1)]  # 4 of 8 blocks taken, the second needs all 8
    owned = list(first.block_ids)
    assert len(owned) == 4
    for _ in range(13):
        step(scheduler)
        assert first.block_ids == owned
    step(scheduler)
    assert first.status is RequestStatus.FINISHED
    assert step(scheduler) == [(1, 0, 1)]
    assert len(second.block_ids) == 8


def test_a_newcomer_leaves_a_block_for_each_sequence_that_may_grow() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    scheduler.add(request(0, [1] * 4, max_new_tokens=12))
    scheduler.add(request(1, [2] * 4, max_new_tokens=12))
    scheduler.add(request(2, [3] * 4, max_new_tokens=12))
    assert step(scheduler) == [(0, 0, 4), (1, 0, 4)]


def test_sequences_that_cannot_grow_need_no_spare_block() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    for i in range(4):
        scheduler.add(request(i, [i] * 2, max_new_tokens=2))
    assert len(step(scheduler)) == 4


# --- budget and chunks ---


def test_long_prompts_run_in_chunks() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=8))
    scheduler.add(request(0, [1] * 19))
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduled(batch) == [(0, 0, 8)]
    assert not batch.spans[0].samples
    assert (batch.num_samples, batch.spans[0].num_logits) == (0, 0)
    scheduler.update(batch, [], EOS)
    assert step(scheduler) == [(0, 8, 8)]
    assert step(scheduler) == [(0, 16, 3)]
    assert step(scheduler) == [(0, 19, 1)]


def test_decodes_go_first_and_prompts_share_the_rest() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=8))
    scheduler.add(request(0, [1] * 3))
    step(scheduler)
    scheduler.add(request(1, [2] * 10))
    scheduler.add(request(2, [3] * 10))
    assert step(scheduler) == [(0, 3, 1), (1, 0, 7)]
    assert step(scheduler) == [(0, 4, 1), (1, 7, 3), (2, 0, 4)]
    assert step(scheduler) == [(0, 5, 1), (1, 10, 1), (2, 4, 6)]


def test_a_tight_budget_still_decodes_every_sequence() -> None:
    scheduler = Scheduler(config(max_num_seqs=3, max_num_batched_tokens=3))
    scheduler.add(request(0, [1], max_new_tokens=9))
    scheduler.add(request(1, [1], max_new_tokens=9))
    scheduler.add(request(2, [1] * 5, max_new_tokens=9))
    assert step(scheduler) == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]
    for start in range(1, 5):
        assert step(scheduler) == [(0, start, 1), (1, start, 1), (2, start, 1)]


def test_prompts_and_decodes_take_turns_in_separate_steps() -> None:
    scheduler = Scheduler(config(separate_steps=True, max_num_batched_tokens=8))
    scheduler.add(request(0, [1] * 4))
    assert step(scheduler) == [(0, 0, 4)]
    scheduler.add(request(1, [2] * 12))
    scheduler.add(request(2, [3] * 2))
    assert step(scheduler) == [(0, 4, 1)]
    assert step(scheduler) == [(1, 0, 8)]
    assert step(scheduler) == [(0, 5, 1)]
    assert step(scheduler) == [(1, 8, 4), (2, 0, 2)]
    assert step(scheduler) == [(0, 6, 1), (1, 12, 1), (2, 2, 1)]
    assert step(scheduler) == [(1, 13, 1), (2, 3, 1)]


def test_without_chunks_a_prompt_runs_whole() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=8, chunked_prefill=False))
    scheduler.add(request(0, [1] * 5))
    scheduler.add(request(1, [2] * 5))
    scheduler.add(request(2, [3] * 20))
    scheduler.add(request(3, [4] * 2))
    assert step(scheduler) == [(0, 0, 5)]
    assert step(scheduler) == [(0, 5, 1), (1, 0, 5)]
    # Longer than the budget: alone beside the decodes.
    assert step(scheduler) == [(0, 6, 1), (1, 5, 1), (2, 0, 20)]
    assert step(scheduler) == [(0, 7, 1), (1, 6, 1), (2, 20, 1), (3, 0, 2)]


# --- prefix cache ---


def test_a_shared_prompt_is_computed_once() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=32))
    first, second = request(0, [1] * 10), request(1, [1] * 10)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)  # the first is still running
    assert step(scheduler) == [(0, 10, 1), (1, 8, 2)]
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert second.num_cached_tokens == 8
    stats = scheduler.stats
    assert (stats.num_prompt_tokens, stats.num_prefix_hit_tokens) == (20, 8)


def test_a_chunk_in_the_cache_is_matched_while_the_rest_is_prefilled() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=10))
    scheduler.add(request(0, [1] * 20))
    step(scheduler)
    scheduler.add(request(1, [*([1] * 9), 2]))
    assert step(scheduler) == [(0, 10, 10)]
    assert step(scheduler) == [(0, 20, 1), (1, 8, 2)]


def test_generated_tokens_are_matched_after_the_request_ended() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(0, [1] * 6, max_new_tokens=3))
    for _ in range(3):
        step(scheduler)
    assert not scheduler.has_unfinished()
    scheduler.add(request(1, [*([1] * 6), 5, 5, 5, 6]))
    assert step(scheduler) == [(1, 8, 2)]


def test_the_same_prompt_again_leaves_one_token_to_compute() -> None:
    scheduler = Scheduler(config())
    for i in range(2):
        scheduler.add(request(i, [1] * 9, max_new_tokens=1))
        assert step(scheduler) == [(i, 8 * i, 9 - 8 * i)]


def test_a_blocked_head_waits_until_something_changed() -> None:
    scheduler = Scheduler(config(num_blocks=6, max_num_batched_tokens=32))
    scheduler.add(request(0, [1] * 16, max_new_tokens=8))
    scheduler.add(request(1, [2] * 16, max_new_tokens=1))
    scheduler.add(request(2, [3], max_new_tokens=1))
    for _ in range(8):
        assert [span[0] for span in step(scheduler)] == [0]  # no overtaking
    assert step(scheduler) == [(1, 0, 16), (2, 0, 1)]


def test_a_blocked_head_enters_when_its_prefix_was_computed() -> None:
    scheduler = Scheduler(config(num_blocks=7, max_num_batched_tokens=10))
    scheduler.add(request(0, [1] * 18, max_new_tokens=4))
    step(scheduler)
    scheduler.add(request(1, [1] * 15, max_new_tokens=1))
    assert step(scheduler) == [(0, 10, 8)]
    assert step(scheduler) == [(0, 18, 1), (1, 12, 3)]


# --- preemption ---


def test_the_newest_request_is_preempted_and_keeps_its_tokens() -> None:
    scheduler = Scheduler(config(num_blocks=4, prefix_caching=False))
    first, second = request(0, [1] * 4, max_new_tokens=12), request(1, [2] * 4, max_new_tokens=6)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(5):
        step(scheduler)
    assert second.num_output_tokens == 5
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.preempted == (second,)
    assert scheduled(batch) == [(0, 8, 1)]
    assert second.status is RequestStatus.PREEMPTED
    assert (second.num_output_tokens, second.num_computed_tokens) == (5, 0)
    assert (second.block_ids, second.num_published_blocks) == ([], 0)
    scheduler.update(batch, [5], EOS)
    while second.status is RequestStatus.PREEMPTED:
        spans = step(scheduler)
    assert first.status is RequestStatus.FINISHED
    assert spans == [(1, 0, 9)]  # prompt and output in one span, then one more token
    assert second.status is RequestStatus.FINISHED
    assert second.output_token_ids == [5] * 6
    assert (second.num_preemptions, scheduler.stats.num_preemptions) == (1, 1)


def test_a_preempted_request_comes_back_before_those_that_wait() -> None:
    scheduler = Scheduler(config(num_blocks=4, max_num_seqs=2))
    for i in range(3):
        scheduler.add(request(i, [i] * 4, max_new_tokens=6))
    order: list[int] = []
    while scheduler.has_unfinished():
        order += [i for i, _, _ in step(scheduler)]
    assert scheduler.stats.num_preemptions > 0
    assert order.index(2) > max(i for i, who in enumerate(order) if who == 0)


def test_a_request_that_needs_a_block_may_preempt_itself() -> None:
    scheduler = Scheduler(config(num_blocks=6))
    first, second = request(0, [1] * 6, max_new_tokens=10), request(1, [2] * 7, max_new_tokens=10)
    scheduler.add(first)
    scheduler.add(second)
    for _ in range(6):
        step(scheduler)
    assert (first.num_tokens, second.num_tokens) == (12, 13)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.preempted == (second,)
    assert scheduled(batch) == [(0, 11, 1)]


# --- update and abort ---


def test_update_takes_only_the_last_batch_and_once() -> None:
    scheduler = Scheduler(config())
    scheduler.add(request(0, [1]))
    batch = scheduler.schedule()
    assert batch is not None
    with pytest.raises(ValueError, match="2 sampled entries for 1 sampling spans"):
        scheduler.update(batch, [5, 5], EOS)
    scheduler.update(batch, [5], EOS)
    with pytest.raises(RuntimeError, match="last schedule"):
        scheduler.update(batch, [5], EOS)


def test_the_reasons_for_the_end() -> None:
    scheduler = Scheduler(config())
    requests = [
        Request(0, [1], SamplingParams(max_new_tokens=3)),
        Request(1, [1], SamplingParams(max_new_tokens=2)),
        Request(2, [1], SamplingParams(stop_token_ids=(6,))),
    ]
    for each in requests:
        scheduler.add(each)
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduler.update(batch, [5, 5, 6], EOS) == [requests[2]]
    batch = scheduler.schedule()
    assert batch is not None
    assert scheduler.update(batch, [0, 5], EOS) == requests[:2]
    reasons: list[FinishReason | None] = [each.finish_reason for each in requests]
    assert reasons == ["stop", "length", "stop"]
    assert requests[0].output_token_ids == [5, 0]
    assert all(each.finish_time is not None for each in requests)


def test_token_times_are_one_per_token_and_ordered() -> None:
    scheduler = Scheduler(config())
    only = request(0, [1] * 3)
    scheduler.add(only)
    while scheduler.has_unfinished():
        step(scheduler)
    metrics = only.metrics
    assert len(metrics.token_times) == 4
    assert metrics.first_scheduled_time is not None
    assert metrics.finish_time is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, *metrics.token_times]
    assert times == sorted(times)
    assert metrics.finish_time >= times[-1]


@pytest.mark.parametrize("when", ["waiting", "running", "in flight"])
def test_an_abort_frees_everything(when: str) -> None:
    scheduler = Scheduler(config(prefix_caching=False, max_num_seqs=2))
    kept, gone = request(0, [1] * 6, max_new_tokens=9), request(1, [2] * 6, max_new_tokens=9)
    for each in (kept, gone):
        if not (when == "waiting" and each is gone):
            scheduler.add(each)
    step(scheduler)
    if when == "waiting":
        scheduler.add(gone)
    batch = scheduler.schedule() if when == "in flight" else None
    assert scheduler.abort(1) is gone
    assert (gone.status, gone.finish_reason) == (RequestStatus.FINISHED, "abort")
    assert scheduler.block_manager.num_used_blocks == len(kept.block_ids)
    if batch is not None:
        num_tokens = gone.num_tokens
        assert scheduler.update(batch, [5, 5], EOS) == []
        assert gone.num_tokens == num_tokens
    assert scheduler.abort(1) is None
    while scheduler.has_unfinished():
        assert [i for i, _, _ in step(scheduler)] == [0]
    assert scheduler.block_manager.num_used_blocks == 0


def test_an_aborted_preempted_request_leaves_the_queue() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    first, second = request(0, [1] * 4, max_new_tokens=12), request(1, [2] * 4, max_new_tokens=12)
    scheduler.add(first)
    scheduler.add(second)
    while second.status is not RequestStatus.PREEMPTED:
        step(scheduler)
    assert scheduler.abort(1) is second
    assert scheduler.num_waiting == 0


# --- drafts ---


def decoding(scheduler: Scheduler, *requests: Request) -> None:
    for each in requests:
        scheduler.add(each)
    while any(each.num_output_tokens == 0 for each in requests):
        step(scheduler)


def test_drafts_lengthen_a_span_and_accepted_ones_are_kept() -> None:
    scheduler = Scheduler(config())
    only = request(0, [1] * 3, max_new_tokens=20)
    decoding(scheduler, only)
    batch = scheduler.schedule({0: [2, 3, 4]})
    assert batch is not None
    span = batch.spans[0]
    assert scheduled(batch) == [(0, 3, 4)]
    assert (span.token_ids, span.num_logits, span.samples) == ([5, 2, 3, 4], 4, True)
    assert len(span.block_ids) * 4 >= 7
    scheduler.update(batch, [[2, 3, 6]], EOS)
    assert only.output_token_ids == [5, 2, 3, 6]
    assert only.num_computed_tokens == 6
    assert step(scheduler) == [(0, 6, 1)]


def test_rejected_drafts_roll_back_computed_tokens() -> None:
    scheduler = Scheduler(config())
    only = request(0, [1] * 3, max_new_tokens=20)
    decoding(scheduler, only)
    batch = scheduler.schedule({0: [2, 3, 4]})
    assert batch is not None
    scheduler.update(batch, [6], EOS)
    assert only.output_token_ids == [5, 6]
    assert step(scheduler) == [(0, 4, 1)]


def test_a_stop_among_accepted_drafts_drops_the_rest() -> None:
    scheduler = Scheduler(config())
    only = Request(0, [1] * 3, SamplingParams())
    decoding(scheduler, only)
    batch = scheduler.schedule({0: [2, 0, 4, 4, 4, 4]})
    assert batch is not None
    assert scheduler.update(batch, [[2, 0, 4, 4, 4, 4, 6]], EOS) == [only]
    assert only.output_token_ids == [5, 2, 0]
    assert scheduler.block_manager.num_used_blocks == 0
    # What was computed behind the end is in no request and must not be found.
    assert scheduler.block_manager.match_prefix([1, 1, 1, 5, 2, 0, 4, 4, 4]) == ([0], 4)
    assert scheduler.block_manager.num_cached_blocks == 1


@pytest.mark.parametrize("reserve_full", [False, True])
def test_rejected_drafts_give_their_blocks_back(reserve_full: bool) -> None:
    scheduler = Scheduler(config(reserve_full=reserve_full))
    only = request(0, [1] * 3, max_new_tokens=20)
    decoding(scheduler, only)
    batch = scheduler.schedule({0: [2] * 9})
    assert batch is not None
    assert len(only.block_ids) == (6 if reserve_full else 4)
    scheduler.update(batch, [[2, 2, 6]], EOS)
    assert len(only.block_ids) == (6 if reserve_full else 2)
    assert scheduler.block_manager.num_used_blocks == len(only.block_ids)


@pytest.mark.parametrize("sampled", [[], [3, 3], [2, 2, 3], [2, 3, 4, 5]])
def test_sampled_tokens_that_are_no_verified_drafts_are_refused(sampled: list[int]) -> None:
    scheduler = Scheduler(config())
    decoding(scheduler, request(0, [1] * 3, max_new_tokens=20))
    batch = scheduler.schedule({0: [2, 3]})
    assert batch is not None
    with pytest.raises(ValueError, match="leading drafts followed by one more token"):
        scheduler.update(batch, [sampled], EOS)


def test_drafts_keep_to_length_budget_and_free_blocks() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=6, num_blocks=5, max_length=20))
    first, second = request(0, [1] * 4, max_new_tokens=3), request(1, [2] * 6, max_new_tokens=9)
    decoding(scheduler, first, second)
    # Length: first has 5 or 6 of 7 tokens, so that none or one draft may follow.
    room = first.max_num_tokens - first.num_tokens - 1
    batch = scheduler.schedule({0: [1] * 9, 1: [2] * 9})
    assert batch is not None
    assert len(batch.spans[0].draft_token_ids) == room
    assert batch.num_tokens <= 6
    for span in batch.spans:
        assert len(span.block_ids) * 4 >= span.start + span.num_tokens
    assert batch.preempted == ()


def test_drafts_never_take_a_block_that_a_decode_needs() -> None:
    scheduler = Scheduler(config(num_blocks=4))
    first, second = request(0, [1] * 3, max_new_tokens=6), request(1, [2] * 4, max_new_tokens=4)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    batch = scheduler.schedule({0: [1, 1, 1, 1]})
    assert batch is not None
    assert batch.preempted == ()
    assert scheduled(batch)[1] == (1, 4, 1)
    assert len(second.block_ids) == 2


# --- properties ---


@dataclass
class Cache:
    """What each slot holds: the hash of the token prefix that ends with the slot's token."""

    block_size: int
    slots: dict[int, int] = field(default_factory=dict)

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + (
            position % self.block_size
        )


def prefix_hashes(token_ids: Sequence[int]) -> list[int]:
    hashes, last = [], 17
    for token_id in token_ids:
        last = hash((last, token_id))
        hashes.append(last)
    return hashes


def next_token(prefix_hash: int) -> int:
    return (prefix_hash >> 7) % VOCAB


def expected_output(prompt: Sequence[int], params: SamplingParams, max_length: int) -> list[int]:
    """What the model answers when nothing else runs; written without the code under test."""
    tokens, output = list(prompt), list[int]()
    limit = min(max_length, params.max_length or max_length) - len(prompt)
    limit = min(limit, params.max_new_tokens or limit)
    while len(output) < limit:
        token_id = next_token(prefix_hashes(tokens)[-1])
        tokens.append(token_id)
        output.append(token_id)
        stops = (*(() if params.ignore_eos else EOS), *params.stop_token_ids)
        if token_id in stops and len(output) > params.min_length:
            break
    return output


def token_log_probs(prefix_hash: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What a beam search sees of the model."""
    return np.array([-((prefix_hash >> 7 * i) % 61) / 8 for i in range(VOCAB)], np.float32)


def expected_search(
    prompt: Sequence[int], params: SamplingParams, max_length: int
) -> list[tuple[list[int], float]]:
    """(tokens, score) of the answers of a beam search, in the words of transformers' own.

    That keeps num_beams rows from the start, all but one at -1e9, and as many places for finished
    sequences.
    """
    limit = min(max_length, params.max_length or max_length) - len(prompt)
    limit = min(limit, params.max_new_tokens or limit)
    num_beams = params.num_beams
    stops = {*(() if params.ignore_eos else EOS), *params.stop_token_ids}
    keep = max(2, 1 + len(stops)) * num_beams
    running: list[list[int]] = [[] for _ in range(num_beams)]
    scores = np.full(num_beams, -1e9, np.float32)
    scores[0] = 0
    done = [(-1e9, False, list[int]())] * num_beams
    for length in range(1, limit + 1):
        table = np.stack([token_log_probs(prefix_hashes([*prompt, *row])[-1]) for row in running])
        totals = (table + scores[:, None]).ravel()
        order = np.argsort(-totals, kind="stable")[:keep]
        rows = [[*running[i // VOCAB], int(i % VOCAB)] for i in order]
        ends = [
            length == limit or (row[-1] in stops and length > params.min_length) for row in rows
        ]
        going_on = [i for i, end in enumerate(ends) if not end][:num_beams]
        for place, (i, row, end) in enumerate(zip(order, rows, ends, strict=True)):
            if end and place < num_beams:
                score = totals[i] / np.float32(length**params.length_penalty)
                done.append((float(score), True, row))
        done = sorted(done, key=lambda entry: -entry[0])[:num_beams]
        if not going_on:
            break
        assert len(going_on) == num_beams
        running, scores = [rows[i] for i in going_on], totals[order[going_on]]
        if all(finished for _, finished, _ in done):
            best_length = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                best_length = limit
            best = scores[0] / np.float32(best_length**params.length_penalty)
            if params.early_stopping is True or best <= done[-1][0]:
                break
    return [(row, score) for score, _, row in done[: params.n]]


def execute(
    batch: ScheduledBatch,
    cache: Cache,
    scheduler: Scheduler,
    last: Sequence[int | list[int] | Candidates] = (),
) -> list[int | list[int] | Candidates]:
    """Runs a batch as a device would: every span reads, then all write, then tokens come out.

    last: what the batch before yielded, which placeholders refer to.
    """
    sampled: list[int | list[int] | Candidates] = []
    sources, targets = {a for a, _ in batch.block_copies}, [b for _, b in batch.block_copies]
    assert len(set(targets)) == len(targets)
    assert not sources & set(targets)
    for source, target in batch.block_copies:
        for offset in range(cache.block_size):
            found = cache.slots.get(source * cache.block_size + offset)
            if found is not None:
                cache.slots[target * cache.block_size + offset] = found
    writes: dict[int, int] = {}
    for span in batch.spans:
        drafts = list(span.draft_token_ids)
        tokens = [*span.request.token_ids, *drafts]
        end = span.start + span.num_tokens
        assert span.token_ids == tokens[span.start : end]
        for position, token in enumerate(tokens):
            if token < 0:
                entry = last[-1 - token]
                assert not isinstance(entry, Candidates)
                tokens[position] = entry if isinstance(entry, int) else entry[0]
        assert span.samples == (end == len(tokens))
        hashes = prefix_hashes(tokens[:end])
        for position in range(span.start):
            assert cache.slots[cache.slot(span.block_ids, position)] == hashes[position]
        for position in range(span.start, end):
            slot = cache.slot(span.block_ids, position)
            assert slot not in writes, "two writers"
            assert scheduler.block_manager.ref_count(slot // cache.block_size) == 1
            writes[slot] = hashes[position]
        if span.samples and span.request.beam_group is not None:
            count = num_candidates(span.request.sampling_params, EOS)
            sampled.append(likeliest(token_log_probs(hashes[-1]), count))
        elif span.samples:
            known = end - len(drafts)
            accepted: list[int] = []
            for draft, prefix in zip([*drafts, None], hashes[known - 1 :], strict=True):
                accepted.append(next_token(prefix))
                if draft != accepted[-1]:
                    break
            sampled.append(accepted if drafts or end % 2 else accepted[0])
    cache.slots.update(writes)
    return sampled


class Simulation:
    """Runs requests to their end and checks what must hold after every call."""

    def __init__(self, limits: SchedulerConfig, rng: random.Random) -> None:
        self.limits = limits
        self.rng = rng
        self.scheduler = Scheduler(limits)
        self.cache = Cache(limits.block_size)
        self.requests: dict[int, Request] = {}
        self.unfinished: dict[int, Request] = {}
        self.ended: list[int] = []
        self.ahead: deque[tuple[ScheduledBatch, list[int | list[int] | Candidates]]] = deque()
        self.last: list[int | list[int] | Candidates] = []
        self.num_copies = 0
        self.waited: set[str] = set()  # what did not run in the last step

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        request_id = len(self.requests)
        added = Request(request_id, prompt, params)
        try:
            self.scheduler.add(added)
        except UserError:  # nothing but a search whose beams together fill more than the cache
            assert params.num_beams > 1
            return
        self.requests[request_id] = self.unfinished[request_id] = added

    def abort(self, request_id: int) -> None:
        aborted = self.scheduler.abort(request_id)
        assert (aborted is not None) == (request_id in self.unfinished)
        if aborted is not None:
            self._end(aborted)
        self.check()

    def step(self, drafts: bool, abort: int | None = None) -> None:
        """One step; `abort` ends a request between schedule and update."""
        known = {i: list(r.token_ids) for i, r in self.unfinished.items()}
        running = {i for i, r in self.unfinished.items() if r.status is RequestStatus.RUNNING}
        batch = self.scheduler.schedule(self._drafts() if drafts else None)
        if not self.unfinished:
            assert batch is None
            return
        assert batch is not None
        self._check_batch(batch, running)
        assert {i: list(r.token_ids) for i, r in self.unfinished.items()} == known
        sampled = self._execute(batch)
        if abort is not None:
            self.abort(abort)
        for finished in self.scheduler.update(batch, sampled, EOS):
            self._end(finished)
        for i, tokens in known.items():
            assert self.requests[i].token_ids[: len(tokens)] == tokens
        self.check()

    def step_ahead(self, abort: int | None = None) -> None:
        """Runs steps until two are out, then takes the older one's result."""
        while len(self.ahead) < 2:
            if self.ahead and self.ahead[-1][0].decides:
                break
            running = {i for i, r in self.unfinished.items() if r.status is RequestStatus.RUNNING}
            batch = self.scheduler.schedule()
            if batch is None:
                break
            self._check_batch(batch, running)
            self.last = self._execute(batch)
            if not batch.decides:
                self.scheduler.advance(batch)
            self.ahead.append((batch, self.last))
            self.check()
        if abort is not None:
            self.abort(abort)
        if self.ahead:
            batch, sampled = self.ahead.popleft()
            tokens = [entry[0] if isinstance(entry, list) else entry for entry in sampled]
            for finished in self.scheduler.update(batch, tokens, EOS):
                self._end(finished)
        else:
            assert not self.unfinished
        self.check()

    def check(self) -> None:
        manager = self.scheduler.block_manager
        owned = {b for r in self.unfinished.values() for b in blocks_of(r)}
        assert manager.num_used_blocks == len(owned)
        assert manager.num_free_blocks + manager.num_used_blocks == self.limits.num_blocks
        assert self.scheduler.has_unfinished() == bool(self.unfinished)
        order = sorted(self.unfinished.values(), key=lambda r: r.arrival_index)
        waiting = [r.status in WAITING for r in order]
        assert waiting == sorted(waiting), "a newer request runs while an older one waits"
        slots = sum(r.num_slots for r in order if r.status not in WAITING)
        assert slots == self.scheduler.num_running <= self.limits.max_num_seqs

    def finish(self) -> None:
        # The oldest request computes at least a token per step and is never preempted.
        bound = sum(r.max_num_tokens for r in self.unfinished.values())
        bound *= 1 + self.limits.separate_steps
        for _ in range(bound + len(self.ahead)):
            if self.ahead:
                self.step_ahead()
            else:
                self.step(drafts=False)
        assert not self.unfinished
        assert not self.ahead
        assert self.scheduler.block_manager.num_used_blocks == 0
        assert sorted(self.ended) == sorted(self.requests)
        for each in self.requests.values():
            if each.beam_group is not None:
                if each.finish_reason == "abort":
                    assert each.output_token_ids == []
                    continue
                answers = expected_search(
                    each.prompt_token_ids, each.sampling_params, self.limits.max_length
                )
                found = each.beam_group.returned
                assert [(answer.token_ids, answer.score) for answer in found] == answers
                assert each.output_token_ids == answers[0][0]
                continue
            output = expected_output(
                each.prompt_token_ids, each.sampling_params, self.limits.max_length
            )
            assert len(each.token_times) == each.num_output_tokens
            if each.finish_reason == "abort":
                assert each.output_token_ids == output[: each.num_output_tokens]
            else:
                assert each.output_token_ids == output

    def _end(self, ended: Request) -> None:
        assert ended.status is RequestStatus.FINISHED
        assert ended.finish_reason is not None
        assert blocks_of(ended) == []
        del self.unfinished[ended.request_id]
        self.ended.append(ended.request_id)

    def _execute(self, batch: ScheduledBatch) -> list[int | list[int] | Candidates]:
        self.num_copies += len(batch.block_copies)
        return execute(batch, self.cache, self.scheduler, self.last)

    def _drafts(self) -> Mapping[int, list[int]]:
        """For some requests a few right guesses, then perhaps wrong ones."""
        drafts = {}
        for each in self.unfinished.values():
            if each.beam_group is not None:
                continue
            tokens = list(each.token_ids)
            for _ in range(self.rng.randrange(4)):
                tokens.append(next_token(prefix_hashes(tokens)[-1]))
            guesses = tokens[each.num_tokens :]
            drafts[each.request_id] = guesses + [1] * self.rng.randrange(3)
        return drafts

    def _check_batch(self, batch: ScheduledBatch, running: set[int]) -> None:
        limits = self.limits
        span_ids = [span.request.request_id for span in batch.spans]
        assert len(set(span_ids)) == len(span_ids) <= limits.max_num_seqs
        ids = [span.request.owner.request_id for span in batch.spans]
        for owner in {span.request.owner for span in batch.spans}:
            if owner.beam_group is not None:  # all its beams, or none
                assert ids.count(owner.request_id) == len(owner.beam_group.beams)
        assert batch.num_tokens == sum(span.num_tokens for span in batch.spans)
        assert all(span.num_tokens >= 1 for span in batch.spans)
        assert batch.num_tokens <= limits.max_step_tokens
        prefills = [span for span in batch.spans if span.num_tokens > 1 + len(span.draft_token_ids)]
        if limits.chunked_prefill or len(prefills) != 1:
            assert batch.num_tokens <= limits.max_num_batched_tokens
        going = [i for i, r in self.unfinished.items() if not awaits_its_last_token(r)]
        # Where prompts and decodes take turns, each waits for the other's step, and for one only.
        self._check_turn(bool(going) and min(going) not in ids, "the oldest does not proceed")
        victims = [victim.request_id for victim in batch.preempted]
        assert victims == sorted(victims, reverse=True)
        survivors = running - set(victims)
        assert not victims or not survivors or min(victims) > max(survivors)
        assert not victims or set(ids) <= survivors
        decoding_ids = [i for i in survivors if is_decoding(self.requests[i])]
        self._check_turn(not set(decoding_ids) <= set(ids), "a decode waits")
        if limits.separate_steps:
            assert len({i in decoding_ids for i in ids}) == 1, "prompts beside decodes"

    def _check_turn(self, waits: bool, what: str) -> None:
        assert not waits or (self.limits.separate_steps and what not in self.waited), what
        (self.waited.add if waits else self.waited.discard)(what)


def blocks_of(request: Request) -> list[int]:
    """All blocks that a request holds, beams and reserve included."""
    group = request.beam_group
    if group is None:
        return request.block_ids
    beams = [block_id for beam in group.beams for block_id in beam.block_ids]
    return [*request.block_ids, *beams, *group.spare_block_ids]


def is_decoding(request: Request) -> bool:
    group = request.beam_group
    first = request if group is None else group.beams[0]
    return first.num_tokens - first.num_computed_tokens == 1 and not awaits_its_last_token(first)


def awaits_its_last_token(request: Request) -> bool:
    return bool(request.num_placeholders) and request.num_tokens >= request.max_num_tokens


def random_prompt(rng: random.Random, longest: int) -> list[int]:
    """One of a few long texts cut somewhere, so that prefixes are shared, with a tail perhaps."""
    text = random.Random(rng.randrange(3)).choices(range(1, VOCAB), k=longest)
    prompt = text[: rng.randint(1, longest)]
    return (prompt + rng.choices(range(VOCAB), k=rng.randrange(3)))[:longest]


def random_params(rng: random.Random, most_beams: int = 1) -> SamplingParams:
    num_beams = rng.choice([1, 1, 1, 2, 3]) if most_beams > 1 else 1
    num_beams = min(num_beams, most_beams)
    return SamplingParams(
        num_beams=num_beams,
        n=rng.randint(1, num_beams),
        length_penalty=rng.choice([1.0, 0.6, 2.0, -0.5]),
        early_stopping=rng.choice([False, True, "never"]),
        max_new_tokens=rng.choice([None, None, 1, 5, 20]),
        max_length=rng.choice([None, None, 40]),
        min_length=rng.choice([0, 0, 1]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.choice([(), (), (3,)]),
    )


def random_config(draw: st.DrawFn) -> SchedulerConfig:
    max_num_seqs = draw(st.integers(1, 6))
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    max_length = draw(st.integers(8, 40))
    least = -(-max_length // block_size)
    return config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 24)),
        max_length=max_length,
        block_size=block_size,
        num_blocks=least + draw(st.integers(0, 2 * least)),
        reserve_full=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        chunked_prefill=draw(st.booleans()),
        separate_steps=draw(st.booleans()),
    )


def run_random(
    limits: SchedulerConfig,
    seed: int,
    num_events: int,
    drafts: bool,
    ahead: bool = False,
    most_beams: int = 3,
) -> Simulation:
    rng = random.Random(seed)
    simulation = Simulation(limits, rng)
    longest = min(limits.max_length - 1, 20)
    for _ in range(num_events):
        event = rng.random()
        if event < 0.4:
            params = random_params(rng, min(limits.max_num_seqs, most_beams))
            simulation.add(random_prompt(rng, longest), params)
        elif event < 0.5 and simulation.requests:
            simulation.abort(rng.randrange(len(simulation.requests)))
        else:
            abort = None
            if simulation.requests and rng.random() < 0.1:
                abort = rng.randrange(len(simulation.requests))
            if ahead:
                simulation.step_ahead(abort)
            else:
                simulation.step(drafts and rng.random() < 0.5, abort)
    simulation.finish()
    return simulation


@settings(max_examples=300, deadline=None)
@given(
    limits=st.composite(random_config)(),
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(["plain", "drafts", "ahead"]),
)
def test_any_traffic_keeps_every_promise(limits: SchedulerConfig, seed: int, mode: str) -> None:
    run_random(limits, seed, num_events=60, drafts=mode == "drafts", ahead=mode == "ahead")


@pytest.mark.parametrize("mode", ["drafts", "ahead"])
def test_a_thousand_arrivals_and_aborts(mode: str) -> None:
    limits = config(max_num_seqs=8, max_num_batched_tokens=24, max_length=32, num_blocks=16)
    simulation = run_random(limits, 5, 3000, drafts=mode == "drafts", ahead=mode == "ahead")
    stats = simulation.scheduler.stats
    reasons = [each.finish_reason for each in simulation.requests.values()]
    assert len(reasons) >= 1000
    # The run is worth something only if it met all of these.
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) >= 50
    assert stats.num_preemptions >= 20
    assert stats.num_prefix_hit_tokens >= 1000


@pytest.mark.parametrize("reserve_full", [False, True])
@pytest.mark.parametrize("mode", ["plain", "ahead"])
def test_thousands_of_forks_copies_and_aborts_of_beams(mode: str, reserve_full: bool) -> None:
    limits = config(
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_length=32,
        num_blocks=20,
        reserve_full=reserve_full,
    )
    simulation = run_random(limits, 7, 4000, drafts=False, ahead=mode == "ahead")
    searches = [each for each in simulation.requests.values() if each.beam_group is not None]
    reasons = [each.finish_reason for each in searches]
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) >= 30
    assert simulation.num_copies >= 500
    if not reserve_full:
        assert sum(each.num_preemptions for each in searches) >= 20
