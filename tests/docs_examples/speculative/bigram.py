"""Drafts by bigrams: after a token comes what came after it the last time in this request."""

from __future__ import annotations

from collections.abc import Sequence

from predict.engine.drafts import ProposeBehind, SpeculativeConfig
from predict.engine.request_state import Request


class BigramProposer:
    """See predict.engine.drafts.Proposer."""

    looks_up = True  # a proposal takes no step of the device
    num_recorded = 0
    propose_behind: ProposeBehind | None = None

    def __init__(self) -> None:
        self._next: dict[int, dict[int, int]] = {}  # by request: token -> the one behind it
        self._taken_in: dict[int, int] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Sequence[int]]:
        """At most as many tokens for each request as its limit."""
        return [self._drafts(*pair) for pair in zip(requests, limits, strict=True)]

    def _drafts(self, request: Request, limit: int) -> list[int]:
        followers = self._next.setdefault(request.request_id, {})
        end = request.num_known_tokens
        for place in range(self._taken_in.get(request.request_id, 1), end):
            followers[request.token_ids[place - 1]] = request.token_ids[place]
        self._taken_in[request.request_id] = end
        drafts: list[int] = []
        token = request.token_ids[end - 1]
        while len(drafts) < limit and token in followers:
            token = followers[token]
            drafts.append(token)
        return drafts

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """Learns nothing from what came of the drafts."""

    def settle(self) -> None:
        """Has nothing to do while the device works."""

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._next.pop(request_id, None)
        self._taken_in.pop(request_id, None)


def make(config: SpeculativeConfig) -> BigramProposer:
    """The proposer of a config."""
    return BigramProposer()
