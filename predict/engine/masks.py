"""Masks over a step's rows of logits: the tokens that its requests' guides allow."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from predict.engine.choices import Row
from predict.engine.request_state import RequestStatus
from predict.engine.stats import EngineStats
from predict.text.guides import ALL_TOKENS, MaskFiller, MaskRows

BITS = 32  # of a word


def num_words(vocab_size: int) -> int:
    """Words of a row of masks."""
    return -(-vocab_size // BITS)


def masks_from(masks: npt.NDArray[np.int32], begin: int, count: int) -> npt.NDArray[np.int32]:
    """Words [R, count] of masks [R, W], whose first bit is token `begin`; behind the last one 0."""
    first, shift = divmod(begin, BITS)
    words = masks.view(np.uint32)[:, first : first + count + 1]
    words = np.pad(words, ((0, 0), (0, count + 1 - words.shape[1])))
    pairs = words[:, :-1].astype(np.uint64) | words[:, 1:].astype(np.uint64) << np.uint64(BITS)
    return (pairs >> np.uint64(shift)).astype(np.uint32).view(np.int32)


def is_guided(rows: Sequence[Row]) -> bool:
    """Whether any request has a guide."""
    return any(row.request.guide is not None for row in rows)


class GuideMasks:
    """Computes the masks of steps."""

    def __init__(self) -> None:
        self.stats = EngineStats()  # where costs are counted
        self._filler: MaskFiller | None = None

    def fill(self, rows: Sequence[Row], masks: npt.NDArray[np.int32]) -> None:
        """Fills masks [R, W] for `rows`, R at least as many; rows without a guide allow all tokens.

        The tokens before the rows must be known, except drafts, which are allowed ones (see
        GuideState.valid).
        """
        started = time.perf_counter()
        masks[: len(rows)] = ALL_TOKENS
        spans: list[MaskRows] = []
        for index, row in enumerate(rows):
            request = row.request
            if request.guide is None or request.status is RequestStatus.FINISHED:
                continue
            if row.drafts:  # rows of one request follow one another
                spans[-1] = spans[-1]._replace(drafts=row.drafts)
            else:
                spans.append(MaskRows(request.guide, index, ()))
        if self._filler is None:
            self._filler = MaskFiller()
        self._filler.fill(spans, masks)
        self.stats.num_mask_steps += 1
        self.stats.mask_seconds += time.perf_counter() - started
