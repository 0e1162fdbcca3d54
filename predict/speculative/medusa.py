"""Drafts of Medusa heads (Cai et al. 2024), each on the model's final state of the last place.

Head k gives the token k + 2 places behind that of the state. There is no cache: the state of each
request's last place is all that is kept. Drafts stand by the model's own choice, as all others,
and not by Medusa's typical acceptance, which changes the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from predict.engine.choices import Row
from predict.engine.drafts import (
    FAILED,
    DraftSpan,
    SpeculativeConfig,
    StateDrafting,
    StateProposer,
    Tapped,
    drafting_of,
)
from predict.engine.request_state import Request, RequestStatus

if TYPE_CHECKING:
    from paddle import Tensor


class MedusaProposer(StateProposer):
    """See Proposer."""

    def __init__(self, drafting: StateDrafting):
        super().__init__(drafting)
        self._places: dict[int, tuple[int, int]] = {}  # place and row of its state, by request
        self._hidden: Mapping[str, Tensor] = {}  # of the last step

    def follow(self, tapped: Sequence[Tapped], hidden: Mapping[str, Tensor]) -> None:
        self._hidden, self._places = hidden, {}
        for span, row in tapped:
            request = span.request
            if request.status is RequestStatus.RUNNING and span.samples:
                place = request.num_computed_tokens - 1
                self._places[request.request_id] = place, row - span.start + place

    def is_ready(self, request: Request) -> bool:
        place, _ = self._places.get(request.request_id, (-1, 0))
        return place == request.num_tokens - 2

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in requests]
        for head in range(min(self.drafting.num_heads, max(limits))):
            active = [
                index
                for index, limit in enumerate(limits)
                if head < limit and len(drafts[index]) == head
            ]
            if not active:
                break
            of_states = [self._places[requests[index].request_id][1] for index in active]
            rows = [Row(requests[index], tuple(drafts[index])) for index in active]
            spans = [DraftSpan((0,), 0, (0,), 1)] * len(active)  # nothing of it is read
            tokens = self.drafting.launch(
                *(spans, self._hidden, self.taps, of_states, rows, (str(head),))
            )
            for index, token in zip(active, tokens.take(), strict=True):
                if token != FAILED:
                    drafts[index].append(cast(int, token))
        return drafts

    def forget(self, request_id: int) -> None:
        self._places.pop(request_id, None)


def make(config: SpeculativeConfig) -> MedusaProposer:
    """The proposer of a config."""
    return MedusaProposer(drafting_of(config))
