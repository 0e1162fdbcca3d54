"""PaddleNLP's TopP + window verification: more drafts stand, and text is no longer exact.

Off unless asked for. What its op of January 2025 accepts, a draft at a time:
- one among the likeliest tokens that together reach top_p, at most `max_candidate_len` of them;
- else the second likeliest token, if the `window` drafts behind it are each the likeliest of their
  place: they all stand, or none;
and behind the last that stands one more token is drawn.
Here that token is drawn as without drafts (there: among the candidates), and should it be the next
draft, verification goes on behind it (there: with the next step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.beams import likeliest
from predict.engine.sampler import GREEDY, Choice, Row


class Candidates(NamedTuple):
    """The likeliest tokens of a place, without banned ones."""

    token_ids: list[int]  # likeliest first
    num_allowed: int  # of these, the first ones, that reach top_p


class WindowVerifier:
    """Replaces choices by drafts that stand."""

    def __init__(self, window: int, max_candidate_len: int):
        self.window = window
        self.max_candidate_len = max_candidate_len

    def verified(
        self,
        chosen: Sequence[int],
        logits: npt.NDArray[np.float32],
        rows: Sequence[Row],
        choices: Sequence[Choice],
    ) -> list[int]:
        """`chosen`, with each draft that stands in the place of what was drawn there.

        logits: [len(rows), vocab_size], as they were drawn from. Greedy requests, and those with
        typical_p, whose tokens are no prefix of the likeliest, keep theirs.
        """
        result = list(chosen)
        num_drafts = loose_drafts(rows, choices)
        begin = 0
        while begin < len(rows):
            end = begin + num_drafts[begin] + 1
            if end > begin + 1 and min(result[begin:end]) >= 0:
                drafts = rows[end - 1].drafts
                found = [
                    candidates(logits[index], choices[index], self.max_candidate_len)
                    for index in range(begin, end - 1)
                ]
                for index in standing(drafts, found, result[begin:end], self.window):
                    result[begin + index] = drafts[index]
            begin = end
        return result


def loose_drafts(rows: Sequence[Row], choices: Sequence[Choice]) -> list[int]:
    """Drafts from each row on, of requests that do not keep what is drawn: n, n - 1, ..., 0."""
    num_drafts = [0] * len(rows)
    for index in reversed(range(len(rows) - 1)):
        loose = choices[index] is not GREEDY and choices[index].typical_p >= 1
        if loose and rows[index].request is rows[index + 1].request:
            num_drafts[index] = num_drafts[index + 1] + 1
    return num_drafts


def candidates(
    logits: npt.NDArray[np.float32], choice: Choice, max_candidate_len: int
) -> Candidates:
    """The likeliest tokens of a row, and how many of them the request may draw."""
    scaled = (logits - logits.max()).astype(np.float64) / choice.temperature
    weights = np.exp(scaled)
    size = min(max(max_candidate_len, choice.top_k, 2), len(logits))
    top = likeliest(logits, size).token_ids
    kept = weights[top[: choice.top_k]].sum() if choice.top_k else weights.sum()
    reached = np.cumsum(weights[top])
    # Of the tokens up to the first at which the sum reaches top_p.
    num = int(np.searchsorted(reached, choice.top_p * kept)) + 1
    num = min(num, choice.top_k or num, max_candidate_len)
    num = min(num, int((weights[top] >= choice.min_p).sum()))
    return Candidates(top[: max(max_candidate_len, 2)], max(num, 1))


def standing(
    drafts: Sequence[int], found: Sequence[Candidates], chosen: Sequence[int], window: int
) -> list[int]:
    """Indices of the drafts that stand.

    found: per draft. chosen: what was drawn in its place, and behind the last.
    """
    stand: list[int] = []
    index = 0
    while index < len(drafts):
        token_ids, num_allowed = found[index]
        if drafts[index] in token_ids[:num_allowed]:
            stand.append(index)
            index += 1
            continue
        behind = range(index + 1, index + 1 + window)
        if (
            token_ids[1:2] == [drafts[index]]
            and behind.stop <= len(drafts)
            and all(drafts[i] == found[i].token_ids[0] for i in behind)
        ):
            stand += [index, *behind]
            index = behind.stop
        # The token that is drawn here ends the text, unless it is the draft itself.
        if index < len(drafts) and chosen[index] != drafts[index]:
            break
        index += 1
    return stand
