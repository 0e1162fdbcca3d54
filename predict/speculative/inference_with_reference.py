"""Drafts copied from the prompt or the output: what followed the same tokens there.

For editing, summaries and answers that quote. PaddleNLP's `ngram_match`, with another choice among
places: the one with the longest match behind it, and of equal ones the last, where PaddleNLP takes
the first place in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from predict.request import Request
from predict.speculative import SpeculativeConfig

MOST_PLACES = 16  # of an n-gram that are compared, the last ones
LONGEST_MATCH = 64  # tokens


class NgramIndex:
    """For each n-gram of a request the places behind it."""

    def __init__(self, max_ngram_size: int):
        self.sizes = range(1, max_ngram_size + 1)
        # Of shorter n-grams the last place is enough: those of longer ones are asked first.
        self._last: dict[tuple[int, ...], int] = {}
        self._longest: dict[tuple[int, ...], list[int]] = {}
        self.num_indexed = 0  # tokens before which every n-gram's end is in

    def extend(self, token_ids: Sequence[int]) -> None:
        """Takes in the n-grams that have a token behind them now."""
        max_size = self.sizes[-1]
        for end in range(max(self.num_indexed, 1), len(token_ids)):
            for size in self.sizes[: min(end, max_size - 1)]:
                self._last[tuple(token_ids[end - size : end])] = end
            if end >= max_size:
                places = self._longest.setdefault(tuple(token_ids[end - max_size : end]), [])
                places.append(end)
                del places[:-MOST_PLACES]
        self.num_indexed = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The place behind the longest match of the tokens' end; None when all are new."""
        max_size = self.sizes[-1]
        places = self._longest.get(tuple(token_ids[-max_size:]))
        if places:
            if len(places) == 1:
                return places[0]
            return max(reversed(places), key=lambda place: match_length(token_ids, place))
        for size in reversed(self.sizes[:-1]):
            place = self._last.get(tuple(token_ids[-size:]))
            if place is not None:
                return place
        return None


def match_length(token_ids: Sequence[int], place: int) -> int:
    """How many tokens before `place` are those at the end."""
    most = min(place, LONGEST_MATCH)
    for length in range(most):
        if token_ids[place - 1 - length] != token_ids[-1 - length]:
            return length
    return most


class ReferenceProposer:
    """See Proposer."""

    def __init__(self, max_ngram_size: int):
        self.max_ngram_size = max_ngram_size
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Sequence[int]]:
        """See Proposer."""
        return list(map(self._proposal, requests, limits))

    def _proposal(self, request: Request, limit: int) -> list[int]:
        index = self._indices.get(request.request_id)
        if index is None:
            index = self._indices[request.request_id] = NgramIndex(self.max_ngram_size)
        token_ids = request.token_ids
        index.extend(token_ids)
        place = index.find(token_ids)
        if place is None:
            return []
        drafts = token_ids[place : place + limit]
        period = len(drafts)
        while len(drafts) < limit:  # the text's end: what repeats goes on repeating
            drafts.append(drafts[-period])
        return drafts

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """See Proposer."""

    def forget(self, request_id: int) -> None:
        """See Proposer."""
        self._indices.pop(request_id, None)


def make(config: SpeculativeConfig) -> ReferenceProposer:
    """The proposer of a config."""
    return ReferenceProposer(config.max_ngram_size)
