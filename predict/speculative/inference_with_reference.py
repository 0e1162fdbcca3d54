"""Drafts copied from the prompt or the output: what followed the same tokens there.

For editing, summaries and answers that quote. PaddleNLP's `ngram_match`: the longest n-gram first,
the prompt before the output, the first place before later ones.
"""

from __future__ import annotations

from collections.abc import Sequence

from predict.request import Request
from predict.speculative import SpeculativeConfig

Places = dict[tuple[int, ...], int]


class NgramIndex:
    """For each n-gram of a request the first place in the prompt, and in the output, behind it."""

    def __init__(self, max_ngram_size: int):
        self.sizes = range(1, max_ngram_size + 1)
        self.prompt: Places = {}
        self.output: Places = {}
        self.num_indexed = 0  # tokens before which every n-gram's end is in

    def extend(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Takes in the n-grams that have a token behind them now."""
        for end in range(max(self.num_indexed, 1), len(token_ids)):
            places, first = (
                (self.prompt, 0) if end < num_prompt_tokens else (self.output, num_prompt_tokens)
            )
            for size in self.sizes:
                if end - size < first:
                    break
                places.setdefault(tuple(token_ids[end - size : end]), end)
        self.num_indexed = len(token_ids)

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The place behind the longest n-gram that ends the tokens; None when all are new."""
        for size in reversed(self.sizes):
            if len(token_ids) > size:
                ngram = tuple(token_ids[-size:])
                for places in (self.prompt, self.output):
                    if ngram in places:
                        return places[ngram]
        return None


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
        index.extend(request.token_ids, request.num_prompt_tokens)
        place = index.find(request.token_ids)
        return [] if place is None else request.token_ids[place : place + limit]

    def observe(self, request: Request, drafts: Sequence[int], chosen: Sequence[int]) -> None:
        """See Proposer."""

    def forget(self, request_id: int) -> None:
        """See Proposer."""
        self._indices.pop(request_id, None)


def make(config: SpeculativeConfig) -> ReferenceProposer:
    """The proposer of a config."""
    return ReferenceProposer(config.max_ngram_size)
