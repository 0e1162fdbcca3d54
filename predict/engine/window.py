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
from predict.engine.choices import GREEDY, Choice, Row


class Verdict(NamedTuple):
    """What a draft is in its place."""

    rank: int  # tokens that are likelier, or as likely with a lower id
    is_candidate: bool  # one of the likeliest that the request may draw


BANNED = Verdict(-1, False)


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
                verdicts = [
                    verdict(logits[row], draft, choices[row], self.max_candidate_len)
                    for row, draft in enumerate(drafts, begin)
                ]
                for index in standing(drafts, verdicts, result[begin:end], self.window):
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


def verdict(
    logits: npt.NDArray[np.float32], draft: int, choice: Choice, max_candidate_len: int
) -> Verdict:
    """What `draft` is among the tokens of a row [V]; weights only where they decide."""
    own = logits[draft]
    if draft < 0 or own == -np.inf:
        return BANNED
    front = logits[logits > own]
    num_equal = int(np.count_nonzero(logits[:draft] == own))
    rank = len(front) + num_equal
    if rank == 0:
        return Verdict(0, True)
    if rank >= max_candidate_len or 0 < choice.top_k <= rank:
        return Verdict(rank, False)
    largest, temperature = logits.max(), np.float32(choice.temperature)

    def weight(values: npt.NDArray[np.float32]) -> float:
        return float(np.exp((values - largest) / temperature).sum(dtype=np.float64))

    own_weight = weight(own)
    before = weight(front) + num_equal * own_weight
    kept = before + own_weight  # at least
    if choice.top_p < 1 and choice.top_k:
        kept = weight(logits[likeliest(logits, choice.top_k).token_ids])
    elif choice.top_p < 1:
        kept = weight(logits)
    return Verdict(rank, own_weight >= choice.min_p and before < choice.top_p * kept)


def standing(
    drafts: Sequence[int], verdicts: Sequence[Verdict], chosen: Sequence[int], window: int
) -> list[int]:
    """Indices of the drafts that stand.

    chosen: what was drawn in the place of each draft, and behind the last.
    """
    stand: list[int] = []
    index = 0
    while index < len(drafts):
        if verdicts[index].is_candidate:
            stand.append(index)
            index += 1
            continue
        behind = verdicts[index + 1 : index + 1 + window]
        if (
            verdicts[index].rank == 1
            and len(behind) == window
            and all(each.rank == 0 for each in behind)
        ):
            stand += range(index, index + 1 + window)
            index += 1 + window
        # The token that is drawn here ends the text, unless it is the draft itself.
        if index < len(drafts) and chosen[index] != drafts[index]:
            break
        index += 1
    return stand
