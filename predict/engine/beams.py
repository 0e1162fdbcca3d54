"""Beam search: which beams go on with which tokens, and when a search has ended.

As `generate(num_beams=...)` of Hugging Face transformers 5 decides it for a prompt of its own, in
float32 as well: the likeliest continuations of all beams are looked at in order; those that end
are finished hypotheses when they are among the first num_beams, and the first num_beams that do
not end go on. Scores of finished hypotheses are sums of log-probabilities (of the tokens after the
processors, an ending one included) over length ** length_penalty. Among equals the lower beam, then
the lower token comes first. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predict.request import FinishReason, SamplingParams

_COLUMN = 64  # tokens, of a row of logits seen as a table


class Candidates(NamedTuple):
    """The likeliest next tokens of one beam, best first; none for a row that holds no numbers."""

    token_ids: list[int]
    log_probs: list[float]  # float32 values


class Hypothesis(NamedTuple):
    """A finished beam."""

    token_ids: list[int]  # generated
    score: float
    finish_reason: FinishReason


def num_candidates(params: SamplingParams, eos_token_ids: Collection[int]) -> int:
    """Continuations to look at: num_beams of them do not end, whatever the likeliest tokens are."""
    ending = set(params.stop_token_ids)
    if not params.ignore_eos:
        ending.update(eos_token_ids)
    return max(2, 1 + len(ending)) * params.num_beams


def log_softmax(logits: npt.NDArray[np.float32]) -> None:
    """Turns logits [rows, V] into log-probabilities, in place."""
    logits -= logits.max(axis=-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def likeliest(log_probs: npt.NDArray[np.float32], count: int) -> Candidates:
    """The `count` largest of log_probs [V] that are above -inf, the lower index first on ties.

    Without a sort of the vocabulary: none is below the count-th largest of the columns' maxima.
    """
    num_columns, least = len(log_probs) // _COLUMN, -np.inf
    if num_columns >= count:
        columns = log_probs[: _COLUMN * num_columns].reshape(_COLUMN, num_columns)
        least = np.partition(columns.max(axis=0), num_columns - count)[num_columns - count]
    # NaN is not above anything.
    likely = log_probs >= least if least > -np.inf else log_probs > least
    token_ids = np.flatnonzero(likely)
    values = log_probs[token_ids]
    order = np.argsort(-values, kind="stable")[:count]
    return Candidates(token_ids[order].tolist(), values[order].tolist())
