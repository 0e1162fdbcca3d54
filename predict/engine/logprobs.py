"""Logprobs of tokens: of rows of raw logits, before penalties, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predict.request import MAX_LOGPROBS, Logprob, TokenLogprobs


class LogprobTable(NamedTuple):
    """For each row of logits the logprob of one token, and the likeliest tokens."""

    logprobs: npt.NDArray[np.float32]  # [L] of the row's token
    ranks: npt.NDArray[np.int32]  # [L] 1 + tokens that are likelier
    top_token_ids: npt.NDArray[np.int32]  # [L, K] the likeliest first, lowest id on ties
    top_logprobs: npt.NDArray[np.float32]  # [L, K]

    def entry(self, row: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The row's token and `num_top` likeliest ones, at most K."""
        entry = {token_id: Logprob(float(self.logprobs[row]), int(self.ranks[row]))}
        ids, values = self.top_token_ids[row, :num_top], self.top_logprobs[row, :num_top]
        for rank, (token, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True), 1):
            entry.setdefault(token, Logprob(value, rank))
        return entry


def measure(
    logits: npt.NDArray[np.float32], token_ids: Sequence[int], num_top: int = MAX_LOGPROBS
) -> LogprobTable:
    """The table of logits [L, V] for a token per row; num_top: K, where V allows it."""
    num_rows, vocab_size = logits.shape
    num_top = min(num_top, vocab_size)
    tokens = np.asarray(token_ids, np.int64)
    largest = logits.max(axis=1, keepdims=True)
    total = np.exp((logits - largest).astype(np.float32)).sum(axis=1, dtype=np.float64)
    log_total = largest[:, 0].astype(np.float64) + np.log(total)
    rows = np.arange(num_rows)
    chosen = logits[rows, tokens]
    top = np.empty((num_rows, num_top), np.int32)
    for row, values in enumerate(logits if num_top else ()):
        # Tokens as likely as the last one are candidates too: ties go to the lowest id.
        least = np.partition(values, vocab_size - num_top)[vocab_size - num_top]
        candidates = np.flatnonzero(values >= least)
        order = np.argsort(-values[candidates], kind="stable")
        top[row] = candidates[order[:num_top]]
    top_logits = np.take_along_axis(logits, top.astype(np.int64), axis=1)
    return LogprobTable(
        (chosen - log_total).astype(np.float32),
        (1 + (logits > chosen[:, None]).sum(axis=1)).astype(np.int32),
        top,
        (top_logits - log_total[:, None]).astype(np.float32),
    )


class LogprobRecord:
    """The logprobs of one request so far.

    tokens: of each generated token, where num_top is given. prompt: of each prompt token, None for
    the first, where num_prompt_top is given.
    """

    def __init__(self, num_top: int | None, num_prompt_top: int | None, num_prompt_tokens: int):
        self.num_top = num_top
        self.num_prompt_top = num_prompt_top
        self.tokens: list[TokenLogprobs] = []
        self.prompt: list[TokenLogprobs | None] = [None]
        self.cumulative = 0.0  # of `tokens`
        self._num_prompt_tokens = num_prompt_tokens

    @property
    def wants_prompt(self) -> bool:
        """Whether logprobs of the prompt are missing."""
        return self.num_prompt_top is not None and len(self.prompt) < self._num_prompt_tokens

    def add(self, table: LogprobTable, first_row: int, token_ids: Sequence[int]) -> None:
        """Adds new tokens, whose rows of the table begin at `first_row`."""
        if self.num_top is None:
            return
        for row, token_id in enumerate(token_ids, first_row):
            self.tokens.append(table.entry(row, token_id, self.num_top))
            self.cumulative += float(table.logprobs[row])

    def add_prompt(
        self, table: LogprobTable, first_row: int, position: int, token_ids: Sequence[int]
    ) -> None:
        """Adds tokens of the prompt from `position` on; known entries stay."""
        assert self.num_prompt_top is not None
        for index, token_id in enumerate(token_ids):
            if position + index == len(self.prompt):
                entry = table.entry(first_row + index, token_id, self.num_prompt_top)
                self.prompt.append(entry)
