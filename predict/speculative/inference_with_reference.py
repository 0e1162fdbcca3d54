"""Drafts copied from the prompt or the output: what followed the same tokens there.

For editing, summaries and answers that quote. PaddleNLP's `ngram_match`, with another choice among
places: the one with the longest match behind it, and of equal ones the last, where PaddleNLP takes
the first place in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from predict.request import Request
from predict.speculative import ProposeBehind, SpeculativeConfig

MOST_PLACES = 16  # of an n-gram that are compared, the last ones
LONGEST_MATCH = 64  # tokens
MOST_AT_ONCE = 2048  # tokens that one call takes in: about a millisecond of the host's


class NgramIndex:
    """For each n-gram of a request the places behind it."""

    def __init__(self, max_ngram_size: int):
        self.max_ngram_size = max_ngram_size
        # By size. Of shorter n-grams the last place is enough: those of longer ones are asked
        # first, of which `_before` has for each place the one before it (0: none).
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram_size + 1)]
        self._before = [0] * max_ngram_size
        self.num_indexed = 1  # tokens before which every n-gram's end is in

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Takes in the n-grams that have a token behind them among the first `end` ones."""
        begin, max_size = self.num_indexed, self.max_ngram_size
        if end <= begin:
            return
        for size in range(1, max_size):
            self._last[size].update(ngrams(token_ids, size, begin, end))
        last, before = self._last[max_size], self._before
        for ngram, place in ngrams(token_ids, max_size, begin, end):
            before.append(last.get(ngram, 0))
            last[ngram] = place
        self.num_indexed = end

    def find(self, token_ids: Sequence[int], end: int) -> int | None:
        """The place behind the longest match of what ends at `end`; None when all is new."""
        for size in range(min(self.max_ngram_size, end), 0, -1):
            place = self._last[size].get(tuple(token_ids[end - size : end]))
            if place is not None:
                return self._best(token_ids, end, place) if size == self.max_ngram_size else place
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


def ngrams(
    token_ids: Sequence[int], size: int, begin: int, end: int
) -> Iterator[tuple[tuple[int, ...], int]]:
    """The n-grams that end before places `begin` to `end` - 1, with those places."""
    begin = max(begin, size)
    end = max(end, begin)
    pieces = (token_ids[begin - size + i : end - size + i] for i in range(size))
    return zip(zip(*pieces, strict=True), range(begin, end), strict=True)


def match_length(token_ids: Sequence[int], place: int, end: int) -> int:
    """How many tokens before `place` are those before `end`."""
    most = min(place, LONGEST_MATCH)
    for length in range(1, most + 1):
        if token_ids[place - length] != token_ids[end - length]:
            return length - 1
    return most


class ReferenceProposer:
    """See Proposer."""

    looks_up = True
    propose_behind: ProposeBehind | None = None

    def __init__(self, max_ngram_size: int):
        self.max_ngram_size = max_ngram_size
        self._indices: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Sequence[int]]:
        """See Proposer. Long prompts are taken in piece by piece, and have no drafts until then."""
        proposals: list[Sequence[int]] = []
        room = MOST_AT_ONCE
        for request, limit in zip(requests, limits, strict=True):
            index = self._indices.get(request.request_id)
            if index is None:
                index = self._indices[request.request_id] = NgramIndex(self.max_ngram_size)
            before, num_tokens = index.num_indexed, request.num_known_tokens
            index.extend(request.token_ids, min(num_tokens, before + room))
            room -= index.num_indexed - before
            whole = index.num_indexed >= num_tokens
            proposals.append(continuation(request, index, limit) if whole else ())
        return proposals

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """See Proposer."""

    def forget(self, request_id: int) -> None:
        """See Proposer."""
        self._indices.pop(request_id, None)


def continuation(request: Request, index: NgramIndex, limit: int) -> list[int]:
    """`limit` tokens from the place that the index finds on; none where it finds none."""
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
