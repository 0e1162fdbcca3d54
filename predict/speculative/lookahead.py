"""Drafts from a pool of n-grams that the model itself wrote, right or in vain.

The choices behind wrong drafts are Jacobi iterations of the tokens to come: n-grams among them
often turn up a few tokens later (Fu et al. 2024, Lookahead decoding). Every request fills one pool
with the n-grams of its prompt, its output and those choices; a proposal follows the pool from the
request's last tokens on, the longest context first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from predict.request import Request
from predict.speculative import SpeculativeConfig

POOL_SIZE = 1 << 16  # contexts kept; the least recently used goes first
CONTEXT = 3  # tokens of the longest context, at least


class NgramPool:
    """The token that last followed each context of up to `max_context` tokens."""

    def __init__(self, max_context: int):
        self.max_context = max_context
        self._next: OrderedDict[tuple[int, ...], int] = OrderedDict()

    def add(self, token_ids: Sequence[int], first: int) -> None:
        """Takes in what follows what, for the tokens from index `first` on."""
        for end in range(max(first, 1), len(token_ids)):
            for size in range(1, min(self.max_context, end) + 1):
                context = tuple(token_ids[end - size : end])
                self._next[context] = token_ids[end]
                self._next.move_to_end(context)
        while len(self._next) > POOL_SIZE:
            self._next.popitem(last=False)

    def follow(self, token_ids: Sequence[int], limit: int) -> list[int]:
        """Up to `limit` tokens, each what followed the ones before it."""
        recent = list(token_ids[-self.max_context :])
        found: list[int] = []
        while len(found) < limit:
            for size in range(min(self.max_context, len(recent)), 0, -1):
                token = self._next.get(tuple(recent[-size:]))
                if token is not None:
                    break
            else:
                break
            found.append(token)
            recent.append(token)
        return found


class LookaheadProposer:
    """See Proposer."""

    def __init__(self, max_ngram_size: int):
        self._pool = NgramPool(max(max_ngram_size, CONTEXT))
        self._num_seen: dict[int, int] = {}  # tokens of a request that are in the pool

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Sequence[int]]:
        """See Proposer."""
        return list(map(self._proposal, requests, limits))

    def _proposal(self, request: Request, limit: int) -> list[int]:
        first = self._num_seen.get(request.request_id, 0)
        self._pool.add(request.token_ids, first)
        self._num_seen[request.request_id] = len(request.token_ids)
        return self._pool.follow(request.token_ids, limit)

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """See Proposer."""
        self._pool.add(chosen, 1)

    def forget(self, request_id: int) -> None:
        """See Proposer."""
        self._num_seen.pop(request_id, None)


def make(config: SpeculativeConfig) -> LookaheadProposer:
    """The proposer of a config."""
    return LookaheadProposer(config.max_ngram_size)
