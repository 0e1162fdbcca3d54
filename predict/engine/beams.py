"""Beam search: which beams go on with which tokens, and when a search has ended.

As `generate(num_beams=...)` of Hugging Face transformers 5 decides it for a prompt of its own, in
float32 as well: the likeliest continuations of all beams are looked at in order; those that end
are finished hypotheses when they are among the first num_beams, and the first num_beams that do
not end go on. Scores of finished hypotheses are sums of log-probabilities (of the tokens after the
processors, an ending one included) over length ** length_penalty. Among equals the lower beam, then
the lower token comes first. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.stopping import finish_reason
from predict.request import FinishReason, Request, SamplingParams

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


class BeamGroup:
    """The search of one request: its beams, what they have scored, and what is finished.

    `beams` are requests of the batch, best first; before the first fork the added request itself.
    The scheduler is their writer; a group decides from what the sampler found.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.spare_block_ids: list[int] = []  # reserved for the group, in no beam's table
        self.restart()

    def restart(self) -> None:
        """Forgets all but the prompt."""
        self.beams: list[Request] = [self.request]
        self.scores: list[np.float32] = [np.float32(0)]  # sums of log-probabilities, per beam
        self.finished: list[Hypothesis] = []  # best first, at most num_beams

    @property
    def returned(self) -> list[Hypothesis]:
        """The answers, best first, once the search has ended."""
        return self.finished[: self.request.sampling_params.n]

    def choose(
        self, candidates: Sequence[Candidates], eos_token_ids: Collection[int]
    ) -> list[tuple[int, int]]:
        """(index of beam, token) of the beams that go on, best first; empty: the search has ended.

        candidates: of each beam. Changes `scores` and `finished`; `beams` are the caller's to fork.
        """
        request, params = self.request, self.request.sampling_params
        num_generated = len(self.beams[0].token_ids) - request.num_prompt_tokens + 1
        num_tokens = request.num_prompt_tokens + num_generated
        beams, tokens, totals = self._continuations(candidates)
        order = np.lexsort((tokens, beams, -totals))[: num_candidates(params, eos_token_ids)]
        going_on: list[tuple[int, int]] = []
        scores: list[np.float32] = []
        ranked = zip(beams[order].tolist(), tokens[order].tolist(), totals[order], strict=True)
        for rank, (beam, token, total) in enumerate(ranked):
            reason = finish_reason(
                token, num_generated, num_tokens, request.max_num_tokens, params, eos_token_ids
            )
            if reason is None:
                going_on.append((beam, token))
                scores.append(total)
            elif rank < params.num_beams:
                generated = [*self.beams[beam].token_ids[request.num_prompt_tokens :], token]
                score = _penalized(total, num_generated, params.length_penalty)
                self.finished.append(Hypothesis(generated, score, reason))
        # Stable, so that of equal scores the older hypothesis stays.
        self.finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self.finished[params.num_beams :]
        del going_on[params.num_beams :], scores[params.num_beams :]
        self.scores = scores
        return going_on if going_on and self._may_improve(num_generated) else []

    def _continuations(
        self, candidates: Sequence[Candidates]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.float32]]:
        """Beams, tokens, and sums of log-probabilities of all of them."""
        counts = [len(each.token_ids) for each in candidates]
        log_probs = [log_prob for each in candidates for log_prob in each.log_probs]
        return (
            np.repeat(np.arange(len(counts)), counts),
            np.array([token for each in candidates for token in each.token_ids], np.intp),
            np.repeat(np.array(self.scores, np.float32), counts) + np.array(log_probs, np.float32),
        )

    def _may_improve(self, num_generated: int) -> bool:
        """Whether the search goes on after `num_generated` tokens."""
        request, params = self.request, self.request.sampling_params
        if len(self.finished) < params.num_beams:
            return True
        if params.early_stopping is True:
            return False
        length = num_generated
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = request.max_num_tokens - request.num_prompt_tokens
        best = _penalized(self.scores[0], length, params.length_penalty)
        return best > self.finished[-1].score


def _penalized(score: np.float32, length: int, length_penalty: float) -> float:
    return float(score / np.float32(length**length_penalty))
