"""Drafts copied from the prompt or the output: what followed the same tokens there.

For editing, summaries and answers that quote. PaddleNLP's `ngram_match`, with another choice among
places: the one with the longest match behind it, and of equal ones the last, where PaddleNLP takes
the first place in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from predict.engine.drafts import ProposeBehind, SpeculativeConfig
from predict.engine.failures import RequestError
from predict.engine.request_state import Request

MOST_PLACES = 16  # of an n-gram that are compared, the last ones
LONGEST_MATCH = 64  # tokens
MOST_AT_ONCE = 2048  # tokens that one call takes in: about a millisecond of the host's
MOST_LATE = 32  # tokens of a request that wait until the next step runs
TOKEN_BITS = 32


class NgramIndex:
    """For each n-gram of a request the places behind it.

    The key of an n-gram is one integer, TOKEN_BITS per token: the next key follows from the last
    one, and the garbage collector has nothing to traverse.
    """

    def __init__(self, max_ngram_size: int):
        self.max_ngram_size = max_ngram_size
        masks = key_masks(max_ngram_size)
        # Of shorter n-grams the last place is enough, for those of longer ones are asked first.
        self._shorter: list[tuple[int, dict[int, int]]] = [(mask, {}) for mask in masks[-2::-1]]
        self._longest: dict[int, int] = {}  # the last place, and in _before the one before each
        self._before = [0]
        self._mask = masks[-1]
        self._key = self._mask  # before the text there are tokens that no text has
        self.num_indexed = 1  # n-grams that end before this place are indexed

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Indexes the n-grams that are followed by one of the first `end` tokens."""
        key, mask = self._key, self._mask
        longest, before = self._longest, self._before
        for place in range(self.num_indexed, end):
            key = (key << TOKEN_BITS | token_ids[place - 1]) & mask
            for part, places in self._shorter:
                places[key & part] = place
            before.append(longest.get(key, 0))
            longest[key] = place
        self._key = key
        self.num_indexed = max(self.num_indexed, end)

    def find(self, token_ids: Sequence[int], end: int) -> int | None:
        """The place behind the longest indexed match of the tokens before `end`, or None."""
        key = self._key
        for token in token_ids[self.num_indexed - 1 : end]:
            key = key << TOKEN_BITS | token
        key &= self._mask
        place = self._longest.get(key)
        if place is not None:
            return self._best(token_ids, end, place)
        for part, places in self._shorter:
            place = places.get(key & part)
            if place is not None:
                return place
        return None

    def _best(self, token_ids: Sequence[int], end: int, place: int) -> int:
        best, longest = place, match_length(token_ids, place, end)
        for _ in range(MOST_PLACES - 1):
            place = self._before[place]
            if not place or longest == LONGEST_MATCH:
                break
            # Longer ones are alike there, too.
            if place > longest and token_ids[place - 1 - longest] == token_ids[end - 1 - longest]:
                length = match_length(token_ids, place, end)
                if length > longest:
                    best, longest = place, length
        return best


def key_masks(max_size: int) -> list[int]:
    """Masks of the lowest 1, 2, ... tokens of a key."""
    return [(1 << TOKEN_BITS * size) - 1 for size in range(1, max_size + 1)]


def match_length(token_ids: Sequence[int], place: int, end: int) -> int:
    """How many tokens before `place` equal those before `end`."""
    most = min(place, LONGEST_MATCH)
    for length in range(1, most + 1):
        if token_ids[place - length] != token_ids[end - length]:
            return length - 1
    return most


class ReferenceProposer:
    """Proposes what followed the same tokens earlier in the request."""

    looks_up = True
    num_recorded = 0
    propose_behind: ProposeBehind | None = None

    def __init__(self, max_ngram_size: int):
        self.max_ngram_size = max_ngram_size
        self._indices: dict[int, NgramIndex] = {}
        self._late: list[tuple[Request, NgramIndex, int]] = []  # for `settle`, up to that place

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Sequence[int]]:
        """See Proposer. Long prompts are indexed piece by piece, and have no drafts until then.

        `settle` indexes the last step's tokens.
        """
        proposals: list[Sequence[int]] = []
        room = MOST_AT_ONCE
        for request, limit in zip(requests, limits, strict=True):
            index = self._indices.get(request.request_id)
            if index is None:
                index = self._indices[request.request_id] = NgramIndex(self.max_ngram_size)
            before, num_tokens = index.num_indexed, request.num_known_tokens
            whole = before > 1 and num_tokens - before <= MOST_LATE
            if whole:
                self._late.append((request, index, num_tokens))
            else:
                index.extend(request.token_ids, min(num_tokens, before + room))
                room -= index.num_indexed - before
                whole = index.num_indexed >= num_tokens
            proposals.append(continuation(request, index, limit) if whole else ())
        return proposals

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """Changes nothing: drafts come from the request's own tokens."""

    def settle(self) -> None:
        late, self._late = self._late, []
        try:
            while late:
                request, index, end = late.pop()
                index.extend(request.token_ids, end)
        except Exception as error:
            self._late = late
            raise RequestError(request) from error

    def forget(self, request_id: int) -> None:
        self._indices.pop(request_id, None)


def continuation(request: Request, index: NgramIndex, limit: int) -> list[int]:
    """`limit` tokens from the place that the index finds; [] where it finds none."""
    token_ids, end = request.token_ids, request.num_known_tokens
    place = index.find(token_ids, end)
    if place is None:
        return []
    tokens = token_ids[place : min(place + limit, end)]
    period = len(tokens)
    while len(tokens) < limit:  # the text's end: what repeats goes on repeating
        tokens.append(tokens[-period])
    return tokens


def make(config: SpeculativeConfig) -> ReferenceProposer:
    """The proposer of a config."""
    return ReferenceProposer(config.max_ngram_size)
