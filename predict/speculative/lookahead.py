"""Drafts from a pool of n-grams that the model itself generated, accepted or not.

The choices behind wrong drafts are Jacobi iterations of the tokens to come: n-grams among them
often turn up a few tokens later (Fu et al. 2024, Lookahead decoding). Every request fills one pool
with the n-grams of its prompt, its output and those choices; a proposal follows the pool from the
request's last tokens on, the longest context first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from predict.engine.drafts import ProposeBehind, SpeculativeConfig, accepted_tokens
from predict.engine.failures import RequestError
from predict.engine.request_state import Request
from predict.speculative.inference_with_reference import MOST_AT_ONCE, TOKEN_BITS, key_masks

POOL_SIZE = 1 << 18  # contexts kept, the half that was added last for certain: some 50 MB
CONTEXT = 3  # tokens of the longest context, at least
END = -1  # among tokens: what is behind followed something else


class NgramPool:
    """The last continuation of each context of up to `max_context` tokens, longest first.

    Keys are those of NgramIndex. Tokens are stored one after another, with END behind each piece: a
    look-up finds a place among them, and the tokens that follow there.
    """

    def __init__(self, max_context: int):
        self.max_context = max_context
        self._masks = key_masks(max_context)[::-1]
        self._newer: list[dict[int, int]] = [{} for _ in self._masks]
        self._older: list[dict[int, int]] = [{} for _ in self._masks]
        self._newer_tokens: list[int] = []
        self._older_tokens: list[int] = []
        self._parts = list(zip(self._masks, self._newer, self._older, strict=True))

    def add(self, token_ids: Sequence[int], first: int, end: int) -> None:
        first = max(first, 1)
        if first >= end:
            return
        key, mask = self._key(token_ids, first - 1), self._masks[0]
        kept = self._newer_tokens
        shift = len(kept) - first
        for place in range(first, end):
            key = (key << TOKEN_BITS | token_ids[place - 1]) & mask
            for part, newer, _ in self._parts:
                newer[key & part] = place + shift
        kept += token_ids[first:end]
        kept.append(END)
        if max(len(self._newer[0]), len(kept) // 4) > POOL_SIZE // (2 * self.max_context):
            self._newer, self._older = [{} for _ in self._masks], self._newer
            self._newer_tokens, self._older_tokens = [], kept
            self._parts = list(zip(self._masks, self._newer, self._older, strict=True))

    def follow(self, token_ids: Sequence[int], end: int, limit: int) -> list[int]:
        """Up to `limit` tokens that followed the context of the first `end` tokens.

        Where a stored piece ends, its last tokens are looked up in turn.
        """
        key, mask = self._key(token_ids, end), self._masks[0]
        found: list[int] = []
        while len(found) < limit:
            for part, newer, older in self._parts:
                kept, place = self._newer_tokens, newer.get(key & part)
                if place is None:
                    kept, place = self._older_tokens, older.get(key & part)
                if place is not None:
                    break
            else:
                break
            new = kept[place : place + limit - len(found)]
            if END in new:
                del new[new.index(END) :]
            found += new
            for token in new[-self.max_context :]:
                key = (key << TOKEN_BITS | token) & mask
        return found

    def _key(self, token_ids: Sequence[int], end: int) -> int:
        """The key of the tokens before `end`, padded in front with an id that no text has."""
        key = self._masks[0]
        for token in token_ids[max(end - self.max_context, 0) : end]:
            key = (key << TOKEN_BITS | token) & self._masks[0]
        return key


class LookaheadProposer:
    """Proposes from a pool of n-grams that the model generated."""

    looks_up = True
    num_recorded = 0
    propose_behind: ProposeBehind | None = None

    def __init__(self, max_ngram_size: int):
        self._pool = NgramPool(max(max_ngram_size, CONTEXT))
        self._num_seen: dict[int, int] = {}  # tokens of a request in the pool, or in `_late`
        # Arguments of NgramPool.add for `settle`, and the request.
        self._late: deque[tuple[Request, Sequence[int], int, int]] = deque()

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Sequence[int]]:
        """See Proposer. `settle` adds the tokens, long prompts piece by piece."""
        proposals: list[Sequence[int]] = []
        room = MOST_AT_ONCE
        for request, limit in zip(requests, limits, strict=True):
            token_ids, num_tokens = request.token_ids, request.num_known_tokens
            first = self._num_seen.get(request.request_id, 0)
            end = min(num_tokens, first + room)
            self._late.append((request, token_ids, first, end))
            self._num_seen[request.request_id] = end
            room -= end - first
            whole = end == num_tokens
            proposals.append(self._pool.follow(token_ids, end, limit) if whole else ())
        return proposals

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """See Proposer. Accepted tokens are added with the request's own."""
        num_accepted = len(accepted_tokens(drafts, chosen))
        if num_accepted < len(chosen):
            self._late.append((request, chosen, num_accepted, len(chosen)))

    def settle(self) -> None:
        try:
            while self._late:
                request, token_ids, first, end = self._late.popleft()
                self._pool.add(token_ids, first, end)
        except Exception as error:
            raise RequestError(request) from error

    def forget(self, request_id: int) -> None:
        self._num_seen.pop(request_id, None)


def make(config: SpeculativeConfig) -> LookaheadProposer:
    """The proposer of a config."""
    return LookaheadProposer(config.max_ngram_size)
