"""Requests that come, go and are preempted amid drafting and verification: no block is lost."""

from __future__ import annotations

import numpy as np
import pytest

from predict import SamplingParams
from predict.engine.drafts import DraftNetwork, SpeculativeConfig
from predict.engine.engine import Engine
from predict.engine.request_state import Request
from predict.engine.sampler import Sampler
from predict.engine.scheduled import SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.speculative import proposer_of
from predict.speculative.draft_model import DraftModelProposer
from tests.support.draft_models import BLOCK, VOCABULARY, CacheReader, expected
from tests.support.drafts import METHODS, Generous

NUM_BLOCKS = 11
NUM_SEQS = 5


def make_engine(method: str, ahead: bool) -> Engine:
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=40,
            max_length=130,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
        )
    )
    sampler = Sampler(0, ())
    runner = CacheReader(NUM_BLOCKS, ahead)
    own = CacheReader(
        *(NUM_BLOCKS + NUM_SEQS, ahead, 0.2), target=runner if ahead else None, failures=0.02
    )
    draft = DraftNetwork(
        runner=own,
        sampler=sampler,
        block_size=BLOCK,
        num_blocks=NUM_BLOCKS,
        token_budget=40,
        follower=own if ahead else None,
    )
    proposer = proposer_of(SpeculativeConfig(method=method, max_ngram_size=2, draft=draft))
    policy = Generous(6, 40, proposer.looks_up)
    return Engine(scheduler, runner, sampler, (), proposer, policy)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_aborts_amid_drafts_lose_no_block_and_change_no_text(method: str, ahead: bool) -> None:
    """About 10,000 random events over all six cases: a request comes, one is aborted, a step."""
    engine, random = make_engine(method, ahead), np.random.default_rng(0)
    manager = engine.scheduler.block_manager
    shared = random.integers(0, 4, 36).tolist()
    alive: dict[int, Request] = {}
    requests: list[Request] = []

    def check_blocks() -> None:
        held = {block for request in alive.values() for block in request.block_ids}
        assert len(held) == manager.num_used_blocks
        assert manager.num_free_blocks + manager.num_used_blocks == NUM_BLOCKS

    for _ in range(1700):
        event = random.random()
        if event < 0.2 and len(alive) < 9:
            prompt = shared[: int(random.integers(0, 37))]
            prompt += random.integers(0, 4, int(random.integers(1, 30))).tolist()
            params = SamplingParams(
                max_new_tokens=int(random.integers(1, 64)), temperature=0.0, ignore_eos=True
            )
            request = Request(len(requests), prompt, params)
            engine.add(request)
            requests.append(request)
            alive[request.request_id] = request
        elif event < 0.25 and alive:
            victim = int(random.choice(list(alive)))
            assert engine.abort(victim) is alive.pop(victim)
        elif event < 0.35 and len(engine._steps) <= engine.runner.num_ahead:
            engine._launch()  # the next events come amid the step
        else:
            for ended in engine.step()[1]:
                del alive[ended.request_id]
        check_blocks()
    while engine.step()[0] is not None:
        pass
    assert manager.num_used_blocks == 0
    assert engine.stats.num_accepted_draft_tokens > 300
    assert engine.scheduler.stats.num_preemptions > 0
    for request in requests:
        output = request.output_token_ids
        assert output == expected(request.prompt_token_ids, len(output))


def test_drafts_behind_a_verification_are_as_right_as_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The stand-in's choice depends on all of its cache: a wrong token there, and all go wrong."""

    def choice(history: list[int]) -> int:
        return sum((index + 1) * token for index, token in enumerate(history)) % VOCABULARY

    monkeypatch.setattr("tests.support.draft_models.next_token", choice)
    shares = []
    for follows in (False, True):
        engine, random = make_engine("draft_model", ahead=True), np.random.default_rng(0)
        assert isinstance(engine.speculation.proposer, DraftModelProposer)
        reader = engine.speculation.proposer.network.runner
        assert isinstance(reader, CacheReader)
        reader.failures = 0.0
        if not follows:
            engine.speculation.proposer.propose_behind = None
        requests: list[Request] = []
        for number in range(40):
            prompt = random.integers(0, VOCABULARY, int(random.integers(1, 30))).tolist()
            params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
            requests.append(Request(number, prompt, params))
            engine.add(requests[-1])
        while engine.step()[0] is not None:
            pass
        for request in requests:
            assert request.output_token_ids == expected(request.prompt_token_ids, 60)
        assert (reader.num_followed > 500) == follows
        assert engine.scheduler.stats.num_preemptions > 5
        shares.append(engine.stats.num_accepted_draft_tokens / engine.stats.num_draft_tokens)
    assert 0.4 < shares[0] < 0.6
    assert abs(shares[1] - shares[0]) < 0.03
