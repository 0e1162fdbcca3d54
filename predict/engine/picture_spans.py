"""Steps of models where the tokens of one picture see each other: spans cut at pictures.

A picture's tokens are a row of the batch of their own, which sees the whole of its context: a
prefix mask. The tokens before and behind it are rows without one. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.nn.inputs import RowKind, StepInputs, max_lens_of


def apart(inputs: StepInputs, spans: Sequence[ScheduledSpan]) -> StepInputs:
    """The inputs with a row for each picture, and for what stands before and behind it (NumPy).

    Of each picture a span has no token, or all up to its end: see `uncut`.
    """
    rows, lengths, behind, prefixes = list[int](), list[int](), list[int](), list[bool]()
    for row, span in enumerate(spans):
        at, end = span.start, span.start + span.num_tokens
        pictures = span.request.pictures
        found = () if pictures is None else pictures.within(at, end)
        borders = [(max(at, each.start), each.end) for each in found]
        for low, high in borders:
            for stop, is_picture in ((low, False), (high, True)):
                if stop > at:
                    rows.append(row)
                    lengths.append(stop - at)
                    behind.append(end - stop)
                    prefixes.append(is_picture)
                    at = stop
        if at < end:
            rows.append(row)
            lengths.append(end - at)
            behind.append(0)
            prefixes.append(False)
    contexts = inputs.context_lens[rows] - np.array(behind, np.int32)
    borders_of = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=borders_of[1:])
    kind, logit_indices = RowKind(inputs.row_kind), inputs.logit_indices
    if kind == RowKind.LAST:
        kind = RowKind.LISTED
    elif kind == RowKind.NONE:  # whose rows are the last ones
        logit_indices = borders_of[1:] - 1
    pages = inputs.adapter_pages
    return inputs._replace(
        cu_seqlens_q=borders_of,
        context_lens=contexts.astype(np.int32),
        block_tables=inputs.block_tables[rows],
        logit_indices=logit_indices.astype(np.int32),
        max_lens=max_lens_of(lengths, contexts.tolist(), kind),
        adapter_pages=None if pages is None else pages[rows],
        prefix_lens=np.where(prefixes, contexts, 0).astype(np.int32),
    )


def uncut(request: Request, start: int, num_tokens: int) -> int:
    """How many of so many tokens from `start` on end within no picture."""
    if request.pictures is None:
        return num_tokens
    for each in request.pictures.within(start + num_tokens - 1, start + num_tokens):
        if each.end > start + num_tokens:
            return max(each.start - start, 0)
    return num_tokens
