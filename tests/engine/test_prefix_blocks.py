"""Tuned prefixes in the scheduler: whole blocks shared and pinned, the partial one copied."""

import random

import pytest

from predict.adapters.prefixes import NO_PREFIX, ServedPrefix, draft_table
from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduler import Scheduler
from predict.errors import UserError
from predict.request import SamplingParams
from tests.support import scheduler_traffic
from tests.support.resource_traffic import ComingAndGoing, PrefixSimulation
from tests.support.scheduler_traffic import EOS, config


def request(request_id: int, prompt: list[int], prefix: ServedPrefix, beams: int = 1) -> Request:
    params = SamplingParams(max_new_tokens=4, ignore_eos=True, num_beams=beams)
    return Request(request_id, prompt, params, prefix=prefix)


def run(scheduler: Scheduler, token_id: int = 5) -> list[tuple[int, int]]:
    """Runs a step; its copies."""
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [token_id] * batch.num_samples, EOS)
    scheduler.check()
    return list(batch.block_copies)


def test_tables_begin_with_whole_blocks_and_a_copy_of_the_partial_one() -> None:
    scheduler = Scheduler(config())
    prefix = scheduler.pin_prefix("p", 10)  # of blocks of 4: two, and two tokens
    one, two = request(0, [1, 2, 3], prefix), request(1, [4, 2, 3], prefix)
    scheduler.add(one)
    scheduler.add(two)
    batch = scheduler.schedule()
    assert batch is not None
    own = [one.block_ids[2], two.block_ids[2]]
    assert batch.block_copies == tuple((prefix.partial, block) for block in own)
    assert [span.block_ids[:2] for span in batch.spans] == [list(prefix.block_ids)] * 2
    assert len({*own, *prefix.all_block_ids}) == 5
    inputs = span_inputs(batch.spans, 4)
    assert inputs.positions.tolist() == [0, 1, 2, 0, 1, 2]
    assert inputs.context_lens.tolist() == [13, 13]
    first = [own[0] * 4 + 2, own[0] * 4 + 3, one.block_ids[3] * 4]
    assert inputs.slot_mapping.tolist()[:3] == first
    scheduler.update(batch, [5, 5], EOS)
    scheduler.check()
    assert run(scheduler) == []


def test_blocks_behind_a_prefix_are_shared_under_it_alone() -> None:
    scheduler = Scheduler(config())
    prefix, other = scheduler.pin_prefix("p", 6), scheduler.pin_prefix("q", 6)
    prompt = [1, 2, 3, 1, 2, 3, 1]
    scheduler.add(request(0, prompt, prefix))
    while scheduler.has_unfinished():
        run(scheduler)
    again, none = request(1, prompt, prefix), request(2, prompt, NO_PREFIX)
    others = request(3, prompt, other)
    for each in (again, none, others):
        scheduler.add(each)
    copies = run(scheduler)
    # 2 + 4 tokens fill the copy and a block; the last one is computed.
    assert [each.num_cached_tokens for each in (again, none, others)] == [6, 0, 0]
    assert copies == [(other.partial, others.block_ids[1])]


def test_whole_prefixes_need_no_copies() -> None:
    scheduler = Scheduler(config())
    prefix = scheduler.pin_prefix("p", 8)
    assert prefix.partial is None
    scheduler.add(request(0, [1, 2, 3], prefix))
    assert run(scheduler) == []


def test_beside_a_draft_model_own_tokens_have_whole_blocks() -> None:
    scheduler = Scheduler(config(for_drafts=True, max_num_batched_tokens=32))
    partial, whole = scheduler.pin_prefix("p", 10), scheduler.pin_prefix("w", 8)
    requests = [request(i, [1, 2, 3, 4], each) for i, each in enumerate((partial, whole))]
    for each in requests:
        scheduler.add(each)
    for num_blocks in (1, 2, 2):
        run(scheduler)
        assert [len(draft_table(r.block_ids, r.prefix)) for r in requests] == [num_blocks] * 2
    # The target alone would have its 16 tokens in 4 blocks.
    assert [len(each.block_ids) for each in requests] == [5, 4]


def test_a_request_that_no_cache_beside_prefixes_holds_is_refused() -> None:
    scheduler = Scheduler(config(num_blocks=6))
    prefix = scheduler.pin_prefix("p", 10)
    scheduler.add(request(0, [1] * 6, prefix))  # 10 + 10 tokens: 5 blocks, 2 of them the prefix's
    with pytest.raises(UserError, match=r"need 4 cache blocks of 4 tokens, the cache has 3 "):
        scheduler.add(request(1, [1] * 7, prefix))
    with pytest.raises(UserError, match=r"allowed: prompts of at most 21 tokens.*32 less 10 of it"):
        scheduler.add(request(2, [1] * 22, prefix))
    with pytest.raises(UserError, match=r"12 tokens, which take 3 blocks .* the cache has 3 free"):
        scheduler.pin_prefix("q", 12)


def test_blocks_are_free_when_the_last_request_with_the_prefix_has_ended() -> None:
    scheduler = Scheduler(config(max_num_seqs=1))
    prefix, other = scheduler.pin_prefix("p", 10), scheduler.pin_prefix("q", 3)
    runs, waits = request(0, [1, 2, 3], prefix), request(1, [4, 2], prefix)
    scheduler.add(runs)
    scheduler.add(waits)
    run(scheduler)
    scheduler.unpin_prefix(prefix)
    scheduler.check()
    assert scheduler.num_pinned_blocks == 4
    with pytest.raises(UserError, match="its prefix p was unloaded before the request was queued"):
        scheduler.add(request(2, [1], prefix))
    scheduler.abort(0)
    assert scheduler.num_pinned_blocks == 4
    while scheduler.has_unfinished():
        run(scheduler)
    assert scheduler.num_pinned_blocks == scheduler.block_manager.num_used_blocks == 1
    with pytest.raises(UserError, match="its prefix p was unloaded"):
        scheduler.add(request(3, [1], prefix))
    scheduler.unpin_prefix(other)
    assert scheduler.block_manager.num_used_blocks == 0
    # What others leave in the cache under a prefix that is gone is nobody's.
    again = scheduler.pin_prefix("p", 10)
    scheduler.add(request(4, [4, 2], again))
    run(scheduler)
    assert scheduler.stats.num_prefix_hit_tokens == 0


def test_a_late_prefix_takes_no_block_that_a_request_may_need() -> None:
    scheduler = Scheduler(config(num_blocks=20))  # 8 for 32 tokens
    searching = request(0, [1] * 8, NO_PREFIX, beams=4)  # 3 blocks, of which they share 2
    scheduler.add(searching)
    scheduler.pin_prefix("p", 36, is_late=True)
    with pytest.raises(UserError, match=r"take 4 blocks .* leave 7, and a request may need 8; unl"):
        scheduler.pin_prefix("q", 13, is_late=True)
    scheduler.pin_prefix("q", 12, is_late=True)
    scheduler = Scheduler(config(num_blocks=20))
    scheduler.add(request(0, [1] * 23, NO_PREFIX, beams=4))  # 7 blocks, of which they share 5
    with pytest.raises(UserError, match=r"leave 12, and a request may need 13"):
        scheduler.pin_prefix("p", 32, is_late=True)
    scheduler.pin_prefix("p", 28, is_late=True)
    while scheduler.has_unfinished():
        scheduler.abort(0)
    scheduler.pin_prefix("q", 16, is_late=True)


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", ["plain", "drafts", "ahead", "draft model"])
def test_any_traffic_with_prefixes_keeps_every_promise(mode: str) -> None:
    num_hits = num_preemptions = num_copies = 0
    for seed in range(80):
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 5])
        pinned = 1 + 1 + -(-7 // block_size) + (mode == "draft model")
        limits = config(
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(6, 30),
            max_length=32,
            block_size=block_size,
            num_blocks=pinned + -(-32 // block_size) + rng.randint(0, 12),
            reserve_full=rng.random() < 0.2,
            prefix_caching=rng.random() < 0.8,
            chunked_prefill=rng.random() < 0.7,
            separate_steps=rng.random() < 0.3,
            for_drafts=mode == "draft model",
        )
        drafts = mode in ("drafts", "draft model")
        simulation = scheduler_traffic.run_random(
            *(limits, seed, 60, drafts, mode == "ahead"),
            most_beams=1 if limits.for_drafts else 3,
            kind=PrefixSimulation,
        )
        stats = simulation.scheduler.stats
        num_hits += stats.num_prefix_hit_tokens
        num_preemptions += stats.num_preemptions
        num_copies += simulation.num_copies
    assert num_hits > 1000
    assert num_preemptions > 40
    assert num_copies > (400 if mode == "draft model" else 1000)


@pytest.mark.no_cover
@pytest.mark.parametrize("mode", ["plain", "ahead", "draft model"])
def test_prefixes_that_come_and_go_lose_no_block_and_starve_nobody(mode: str) -> None:
    num_loaded = num_refused = num_preemptions = 0
    for seed in range(60):
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 4, 5])
        limits = config(
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(6, 30),
            max_length=32,
            block_size=block_size,
            num_blocks=3 - (-7 // block_size) - (-32 // block_size) + rng.randint(0, 16),
            reserve_full=rng.random() < 0.2,
            prefix_caching=rng.random() < 0.8,
            chunked_prefill=rng.random() < 0.7,
            for_drafts=mode == "draft model",
        )
        beams = 1 if limits.for_drafts else 3
        simulation = scheduler_traffic.run_random(
            *(limits, seed, 120, limits.for_drafts, mode == "ahead", beams), kind=ComingAndGoing
        )
        assert isinstance(simulation, ComingAndGoing)
        num_loaded += simulation.num_loaded
        num_refused += simulation.num_refused
        num_preemptions += simulation.scheduler.stats.num_preemptions
    assert num_loaded - num_refused > 100
    assert num_refused > 100
    assert num_preemptions > 40
