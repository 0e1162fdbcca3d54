"""Drafts of Medusa heads (Cai et al. 2024), each on the model's final state of the last place.

Head k gives the token k + 2 places behind that of the state. There is no cache: the state of each
request's last place is all that is kept. Drafts stand by the model's own choice, as all others,
and not by Medusa's typical acceptance, which changes the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from predict.engine.choices import Row
from predict.engine.drafts import (
    FAILED,
    SpeculativeConfig,
    StateDrafting,
    StateProposer,
    Tapped,
    drafting_of,
)
from predict.engine.request_state import Request, RequestStatus
from predict.engine.sampler import UnadjustedSampler

if TYPE_CHECKING:
    from paddle import Tensor


class MedusaProposer(StateProposer):
    """See Proposer."""

    def __init__(self, drafting: StateDrafting):
        self.drafting, self.network = drafting, drafting.network
        self.taps = drafting.network.taps
        self._sampler = UnadjustedSampler(drafting.sampler.seed, drafting.sampler.eos_token_ids)
        self._states: dict[int, tuple[int, Tensor]] = {}  # place and state [1, H], by request

    def follow(self, tapped: Sequence[Tapped], hidden: Mapping[str, Tensor]) -> None:
        running = [
            (each.span.request, each.row - each.span.start)
            for each in tapped
            if each.span.request.status is RequestStatus.RUNNING and each.span.samples
        ]
        places = [request.num_computed_tokens - 1 for request, _ in running]
        rows = [place + begin for place, (_, begin) in zip(places, running, strict=True)]
        if not rows:
            return
        states = self.network.states(hidden, rows)
        for row, ((request, _), place) in enumerate(zip(running, places, strict=True)):
            self._states[request.request_id] = place, states[row : row + 1]

    def is_ready(self, request: Request) -> bool:
        state = self._states.get(request.request_id)
        return state is not None and state[0] == request.num_tokens - 2

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        import paddle

        drafts: list[list[int]] = [[] for _ in requests]
        for head in range(min(self.network.num_heads, max(limits))):
            active = [
                index
                for index, limit in enumerate(limits)
                if head < limit and len(drafts[index]) == head
            ]
            if not active:
                break
            states = [self._states[requests[index].request_id][1] for index in active]
            rows = [Row(requests[index], tuple(drafts[index])) for index in active]
            logits = self.network.logits(paddle.concat(states), head)
            for index, token in zip(
                active, self.drafting.chosen(logits, self._sampler, rows), strict=True
            ):
                if token != FAILED:
                    drafts[index].append(token)
        return drafts

    def forget(self, request_id: int) -> None:
        self._states.pop(request_id, None)


def make(config: SpeculativeConfig) -> MedusaProposer:
    """The proposer of a config."""
    return MedusaProposer(drafting_of(config))
