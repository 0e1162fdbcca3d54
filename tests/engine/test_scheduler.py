"""The scheduler against a simulated model and cache.

The model's next token is a function of all tokens before it, and the "keys and values" of a token
are the hash of its prefix. So a span that reads a wrong slot, a lost token or a stale block shows
as a different hash.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predict.engine.logprobs import LogprobRecord
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.nn.places import PrefixPlacing, StepPlacing
from predict.nn.spec import PrefixSpec, RopeSpec
from predict.request import FinishReason, SamplingParams
from tests.support.scheduler_traffic import EOS, config, random_config, request, run_random


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
        config(**values)


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


def test_nothing_overtakes_a_head_that_lacks_blocks() -> None:
    scheduler = Scheduler(config(num_blocks=6, max_num_batched_tokens=32))
    scheduler.add(request(0, [1] * 16, max_new_tokens=8))
    scheduler.add(request(1, [2] * 16, max_new_tokens=1))
    scheduler.add(request(2, [3], max_new_tokens=1))
    for _ in range(8):
        assert [span[0] for span in step(scheduler)] == [0]
    assert step(scheduler) == [(1, 0, 16), (2, 0, 1)]


def test_a_blocked_head_enters_when_its_prefix_was_computed() -> None:
    scheduler = Scheduler(config(num_blocks=7, max_num_batched_tokens=10))
    scheduler.add(request(0, [1] * 18, max_new_tokens=4))
    step(scheduler)
    scheduler.add(request(1, [1] * 15, max_new_tokens=1))
    assert step(scheduler) == [(0, 10, 8)]
    assert step(scheduler) == [(0, 18, 1), (1, 12, 3)]


# --- prompts that see themselves both ways; rotary tables by the prompt ---

PREFIX = PrefixPlacing(PrefixSpec(end_id=9, mask_ids=(8,)))
STEPS = StepPlacing(RopeSpec(method="dynamic_steps", original_max_position=8), 32)


def test_a_prompt_with_a_prefix_is_never_cut() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=8, placing=PREFIX))
    for i in range(3):
        scheduler.add(request(i, [*[1] * 3, 8, 9]))
    assert step(scheduler) == [(0, 0, 5)]
    assert step(scheduler) == [(0, 5, 1), (1, 0, 5)]
    assert step(scheduler) == [(0, 6, 1), (1, 5, 1), (2, 0, 5)]


def test_a_prompt_with_a_prefix_waits_for_a_step_with_room() -> None:
    """And then runs, whoever else waits: nobody overtakes it."""
    scheduler = Scheduler(config(max_num_batched_tokens=8, placing=PREFIX))
    scheduler.add(request(0, [8, 9], max_new_tokens=3))
    scheduler.add(request(1, [*[1] * 6, 8, 9]))
    scheduler.add(request(2, [8, 9], max_new_tokens=3))
    for start in (0, 2, 3):
        assert step(scheduler) == [(0, start, 2 if start == 0 else 1)]
    assert step(scheduler) == [(1, 0, 8)]
    assert step(scheduler) == [(1, 8, 1), (2, 0, 2)]


def test_a_prompt_with_a_prefix_that_fits_in_no_step_is_refused() -> None:
    scheduler = Scheduler(config(max_num_batched_tokens=8, placing=PREFIX))
    with pytest.raises(UserError, match=r"request 0: 9 prompt tokens .*allowed: 1 to 8.*raise"):
        scheduler.add(request(0, [*[1] * 7, 8, 9]))
    assert not scheduler.has_unfinished()
    whole = Scheduler(config(max_num_batched_tokens=8, placing=PREFIX, chunked_prefill=False))
    whole.add(request(0, [*[1] * 7, 8, 9]))
    assert step(whole) == [(0, 0, 9)]


def test_logprobs_of_a_prompt_with_a_prefix_are_refused() -> None:
    scheduler = Scheduler(config(placing=PREFIX))
    asks = Request(0, [1, 8, 9], SamplingParams(prompt_logprobs=1))
    asks.logprobs = LogprobRecord(None, 1, 3)
    with pytest.raises(UserError, match=r"request 0: this model's prompts .*leave prompt_logprobs"):
        scheduler.add(asks)


def test_blocks_of_a_prompt_with_a_prefix_serve_nobody_else() -> None:
    scheduler = Scheduler(config(placing=PREFIX))
    for i in range(2):
        scheduler.add(request(i, [*[1] * 9, 8, 9], max_new_tokens=3))
        assert step(scheduler) == [(i, 0, 11)]
        while scheduler.has_unfinished():
            step(scheduler)
    assert scheduler.block_manager.match_prefix([*[1] * 9, 8, 9]) == ([], 0)
    first, second = (request(i, [*[1] * 9, 8, 9]) for i in (2, 3))
    second.leader = first  # as of two samples of one prompt
    scheduler.add(first)
    scheduler.add(second)
    assert step(scheduler) == [(2, 0, 11)]
    assert step(scheduler) == [(2, 11, 1), (3, 0, 11)]


def test_a_preempted_prefix_runs_whole_again_and_what_was_generated_may_be_cut() -> None:
    limits = config(max_num_batched_tokens=8, num_blocks=6, max_num_seqs=2, placing=PREFIX)
    scheduler = Scheduler(limits)
    scheduler.add(request(0, [*[1] * 3, 8, 9], max_new_tokens=11))
    scheduler.add(request(1, [*[1] * 4, 8, 9], max_new_tokens=10))
    spans = []
    while scheduler.has_unfinished():
        spans += [(start, count) for number, start, count in step(scheduler) if number == 1]
    assert scheduler.stats.num_preemptions == 1
    assert [span for span in spans if span[1] > 1] == [(0, 6), (0, 8), (8, 5)]


def test_requests_of_other_rotary_rows_share_no_blocks() -> None:
    scheduler = Scheduler(config(placing=STEPS, max_num_batched_tokens=32))
    for i, (length, cached) in enumerate([(8, 0), (8, 4), (12, 0), (13, 12), (17, 0), (18, 16)]):
        scheduler.add(request(i, [1] * length, max_new_tokens=1))
        assert step(scheduler) == [(i, cached, length - cached)]


def test_salts_stay_apart_from_rotary_rows() -> None:
    scheduler = Scheduler(config(placing=STEPS, max_num_batched_tokens=32))
    scheduler.add(request(0, [1] * 12, max_new_tokens=1))
    assert step(scheduler) == [(0, 0, 12)]
    rows = (32).to_bytes(8, "little")
    params = SamplingParams(max_new_tokens=1)
    for i, salt in enumerate((rows, rows + bytes(8), b""), 1):
        scheduler.add(Request(i, [1] * 12, params, cache_salt=salt))
        assert step(scheduler) == [(i, 0, 12) if salt else (i, 8, 4)]


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


def test_blocks_of_rejected_drafts_let_the_head_of_the_queue_in() -> None:
    scheduler = Scheduler(config(num_blocks=7, max_num_batched_tokens=64))
    running, waits = request(0, [1] * 2, max_new_tokens=20), request(1, [2] * 16, max_new_tokens=1)
    decoding(scheduler, running)
    scheduler.add(waits)
    batch = scheduler.schedule({0: [9] * 4})  # their block is one that the head needs
    assert scheduled(batch) == [(0, 2, 5)]
    assert batch is not None
    scheduler.update(batch, [[8]], EOS)
    assert step(scheduler) == [(0, 3, 1), (1, 0, 16)]


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


@pytest.mark.no_cover
@settings(max_examples=300, deadline=None)
@given(
    limits=st.composite(random_config)(),
    seed=st.integers(0, 2**32 - 1),
    mode=st.sampled_from(["plain", "drafts", "ahead"]),
)
def test_any_traffic_keeps_every_promise(limits: SchedulerConfig, seed: int, mode: str) -> None:
    run_random(limits, seed, num_events=60, drafts=mode == "drafts", ahead=mode == "ahead")


@pytest.mark.no_cover
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


@pytest.mark.no_cover
@pytest.mark.parametrize("num_events", [1200, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reserve_full", [False, True])
@pytest.mark.parametrize("mode", ["plain", "ahead"])
def test_forks_copies_and_aborts_of_beams(mode: str, reserve_full: bool, num_events: int) -> None:
    limits = config(
        max_num_seqs=8,
        max_num_batched_tokens=24,
        max_length=32,
        num_blocks=20,
        reserve_full=reserve_full,
    )
    simulation = run_random(limits, 7, num_events, drafts=False, ahead=mode == "ahead")
    searches = [each for each in simulation.requests.values() if each.beam_group is not None]
    reasons = [each.finish_reason for each in searches]
    assert min(reasons.count(reason) for reason in ("stop", "length", "abort")) >= num_events // 150
    assert simulation.num_copies >= num_events // 10
    if not reserve_full:
        assert sum(each.num_preemptions for each in searches) >= num_events // 200
