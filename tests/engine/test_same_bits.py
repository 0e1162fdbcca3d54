"""With same_bits prompts are cut alike in every step, and what follows them goes by few tokens."""

from __future__ import annotations

import pytest

from predict.engine import queue, scheduled, states
from predict.engine.beams import Candidates
from predict.engine.scheduled import ScheduledBatch
from predict.errors import UserError
from tests.support.scheduler_traffic import Simulation, config, run_random


class AlikeSimulation(Simulation):
    num_cuts = num_again = 0  # of prompts; of spans behind them with several tokens

    def _execute(self, batch: ScheduledBatch) -> list[int | list[int] | Candidates]:
        for span in batch.spans:
            prompt, end = span.request.num_prompt_tokens, span.start + span.num_tokens
            if span.draft_token_ids:  # one by one, as a few tokens are
                assert prompt - span.start <= 1
            elif span.start < prompt:
                assert span.start % 4 == 0
                assert end % 4 == 0 or end == prompt
                self.num_cuts += end < prompt
            else:
                assert span.num_tokens <= 2
                self.num_again += span.num_tokens > 1
        return super()._execute(batch)


@pytest.mark.parametrize("chunked_prefill", [False, True])
def test_tokens_go_the_same_way_in_every_step(
    chunked_prefill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (queue, scheduled, states):
        monkeypatch.setattr(module, "STRIDE", 4)
    monkeypatch.setattr(queue, "FEW_TOKENS", 2)
    limits = config(
        num_state_slots=20,
        num_blocks=9,
        max_num_batched_tokens=9,
        same_bits=True,
        chunked_prefill=chunked_prefill,
    )
    run = run_random(limits, 7, 400, drafts=True, kind=AlikeSimulation)
    assert isinstance(run, AlikeSimulation)
    assert (run.num_cuts > 0) == chunked_prefill
    assert run.num_again > 0


def test_too_small_steps_are_refused() -> None:
    with pytest.raises(UserError, match="too small for batch_invariant with states"):
        config(num_state_slots=20, max_num_seqs=4, max_num_batched_tokens=67, same_bits=True)
