"""PaddleNLP's TopP + window verification: accepts more drafts, and text is no longer exact.

Off unless asked for. Its op of January 2025 accepts, one draft after another:
- a draft among the likeliest tokens that together reach top_p, at most `max_candidate_len` tokens;
- else the second likeliest token, if the `window` drafts behind it are each the likeliest of their
  place: it accepts all of these or none;
and draws one more token behind the last accepted draft.
Here that token is drawn as without drafts (there: among the candidates), and if it equals the next
draft, verification goes on behind it (there: with the next step).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.choices import GREEDY, Choice, Row
from predict.ops.plain_sampling import accept_drafts, rank_of_draft


class WindowDrafts(NamedTuple):
    """The drafts of a step that are verified so, and how."""

    window: int
    max_candidate_len: int
    drafts: Sequence[Sequence[int]]  # see loose_drafts


def verified(
    chosen: Sequence[int],
    logits: npt.NDArray[np.float32],
    drafts: WindowDrafts,
    choices: Sequence[Choice],
) -> list[int]:
    """`chosen`, with each accepted draft in place of the token that was drawn there.

    logits: [len(chosen), vocab_size], which the tokens were drawn from. Greedy requests keep
    their tokens; so do those with typical_p, whose candidates need not be the likeliest.
    """
    result = np.array(chosen, np.int32)
    begin = 0
    while begin < len(result):
        behind = drafts.drafts[begin]
        end = begin + len(behind) + 1
        if behind and (result[begin:end] >= 0).all():
            ranks = []
            for row, draft in enumerate(behind, begin):
                of = choices[row]
                drawing = of.temperature, of.top_p, of.min_p, of.top_k
                ranks.append(rank_of_draft(logits[row], draft, drawing, drafts.max_candidate_len))
            accept_drafts(result[begin:end], behind, ranks, drafts.window)
        begin = end
    return result.tolist()


def loose_drafts(rows: Sequence[Row], choices: Sequence[Choice]) -> list[Sequence[int]]:
    """The drafts behind each row, of requests that window verification applies to."""
    behind: list[Sequence[int]] = [()] * len(rows)
    for index in reversed(range(len(rows) - 1)):
        loose = choices[index] is not GREEDY and choices[index].typical_p >= 1
        if loose and rows[index].request is rows[index + 1].request:
            behind[index] = (rows[index + 1].drafts[-1], *behind[index + 1])
    return behind
