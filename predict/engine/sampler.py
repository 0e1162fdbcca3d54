"""What each request wants of its next token: the sampling operator's inputs, and changed logits."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.beams import Candidates, likeliest, log_softmax, num_candidates
from predict.engine.stopping import suppressed_token_ids
from predict.request import Request, SamplingParams

if TYPE_CHECKING:
    from paddle import Tensor


class Row(NamedTuple):
    """A row of logits: behind a request's tokens and the first of its drafts."""

    request: Request
    drafts: Sequence[int] = ()  # those before the row

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens before the row's, drafts included."""
        return self.request.num_output_tokens + len(self.drafts)


class Choice(NamedTuple):
    """How one row of logits becomes a token, in the order of the sampling operator's inputs."""

    temperature: float  # 0: the largest logit
    top_k: int  # 0: all
    top_p: float
    seed: int
    offset: int
    min_p: float = 0.0


class Adjustment(NamedTuple):
    """What happens to one row of logits before the choice."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    banned: tuple[int, ...] = ()  # token ids

    @property
    def reads_history(self) -> bool:
        """Whether it depends on the request's tokens."""
        return self[:3] != (1.0, 0.0, 0.0)


COLUMN_DTYPES: tuple[Any, ...] = (np.float32, np.int32, np.float32, np.int64, np.int64)
GREEDY = Choice(0.0, 1, 1.0, 0, 0)
UNCHANGED = Adjustment()


def reads_history(params: SamplingParams) -> bool:
    """Whether logits depend on the request's earlier tokens."""
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return penalties != (1.0, 0.0, 0.0)


def request_seed(engine_seed: int, request: Request) -> int:
    """The request's own seed, or one made from the engine's seed and the request's number."""
    if request.sampling_params.seed is not None:
        return request.sampling_params.seed
    return (engine_seed * 0x9E3779B97F4A7C15 + request.request_id + 1) & (1 << 63) - 1


def adjust(
    logits: npt.NDArray[np.float32],
    adjustment: Adjustment,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
) -> None:
    """Changes logits [vocab_size] by a request's tokens, in place.

    token_ids: prompt and output so far. The repetition penalty counts both (Keskar et al. 2019,
    CTRL): it divides positive and multiplies negative logits. Presence and frequency penalty count
    the output's tokens only, as OpenAI's API has them.
    """
    if adjustment.repetition != 1.0:
        seen = np.unique(np.asarray(token_ids))
        values = logits[seen]
        penalty = np.float32(adjustment.repetition)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    output = token_ids[num_prompt_tokens:]
    if output and (adjustment.presence or adjustment.frequency):
        seen, counts = np.unique(np.asarray(output), return_counts=True)
        logits[seen] -= (adjustment.presence + adjustment.frequency * counts).astype(np.float32)
    # Users name the tokens to stop at, and may name ones that the model does not have.
    logits[[token for token in adjustment.banned if token < len(logits)]] = -np.inf


class Sampler:
    """Chooses the next token of each request that has a logit row."""

    def __init__(self, backend: ModuleType, seed: int, eos_token_ids: Sequence[int]):
        self.backend = backend
        self.seed = seed
        self.eos_token_ids = tuple(eos_token_ids)
        # By number of rows: five uploads are a tenth of a small model's step on the host.
        self._greedy_columns: dict[int, list[Tensor]] = {}

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[int | Candidates]:
        """Token ids, one per row, on the CPU; logits: [len(rows), vocab_size] float32.

        A beam's row gets candidates in place of a token.
        """
        beams = [index for index, row in enumerate(rows) if row.request.beam_group is not None]
        if beams:
            return self._with_candidates(logits, rows, beams)
        choices = self.choices(rows)
        logits = self._process(logits, rows, choices)
        tokens: list[int | Candidates] = self.backend.sample(
            logits, *self._columns(choices)
        ).tolist()
        return tokens

    def _with_candidates(
        self, logits: Tensor, rows: Sequence[Row], beams: Sequence[int]
    ) -> list[int | Candidates]:
        import paddle

        values = logits.numpy()
        others = [index for index in range(len(rows)) if index not in beams]
        drawn: list[int | Candidates] = []
        if others:
            drawn = self.sample(
                paddle.to_tensor(values[others], place=logits.place), [rows[i] for i in others]
            )
        found: dict[int, int | Candidates] = dict(zip(others, drawn, strict=True))
        for index in beams:
            row, log_probs = rows[index], values[index].copy()
            log_softmax(log_probs)
            tokens, num_prompt = row.request.token_ids, row.request.num_prompt_tokens
            adjust(log_probs, self._adjustment(row), tokens, num_prompt)
            found[index] = likeliest(log_probs, self.num_candidates(row))
        return [found[index] for index in range(len(rows))]

    def num_candidates(self, row: Row) -> int:
        """Tokens to find for a beam's row."""
        return num_candidates(row.request.sampling_params, self.eos_token_ids)

    def choices(self, rows: Sequence[Row]) -> list[Choice]:
        """One per row; GREEDY itself for each that takes the largest logit.

        The random number of a place in the output is the same with drafts and without.
        """
        choices: list[Choice] = []
        for row in rows:
            params = row.request.sampling_params
            if params.greedy:
                choices.append(GREEDY)
                continue
            seed = request_seed(self.seed, row.request)
            offset = row.num_output_tokens
            choices.append(
                Choice(params.temperature, params.top_k, params.top_p, seed, offset, params.min_p)
            )
        return choices

    def adjustments(self, rows: Sequence[Row]) -> list[Adjustment] | None:
        """One per row, UNCHANGED itself where there is none; None when nobody has one."""
        adjustments = [self._adjustment(row) for row in rows]
        return None if all(each is UNCHANGED for each in adjustments) else adjustments

    def _adjustment(self, row: Row) -> Adjustment:
        params = row.request.sampling_params
        banned = suppressed_token_ids(row.num_output_tokens, params, self.eos_token_ids)
        adjustment = Adjustment(
            params.repetition_penalty, params.presence_penalty, params.frequency_penalty, banned
        )
        return adjustment if adjustment != UNCHANGED else UNCHANGED

    def _columns(self, choices: Sequence[Choice]) -> list[Tensor]:
        """The sampling operator's inputs besides the logits."""
        import paddle

        all_greedy = all(choice is GREEDY for choice in choices)
        if all_greedy and len(choices) in self._greedy_columns:
            return self._greedy_columns[len(choices)]
        columns = [
            paddle.to_tensor(np.array([choice[index] for choice in choices], dtype))
            for index, dtype in enumerate(COLUMN_DTYPES)
        ]
        if all_greedy:
            self._greedy_columns[len(choices)] = columns
        return columns

    def _process(self, logits: Tensor, rows: Sequence[Row], choices: Sequence[Choice]) -> Tensor:
        """Adjusted logits, those below min_p left out; the logits themselves if nobody asks."""
        import paddle

        adjustments = self.adjustments(rows)
        if adjustments is None and not any(choice.min_p for choice in choices):
            return logits
        changed = logits.numpy().copy()
        adjustments = adjustments or [UNCHANGED] * len(rows)
        for values, row, adjustment, choice in zip(
            changed, rows, adjustments, choices, strict=True
        ):
            if adjustment is not UNCHANGED:
                tokens = [*row.request.token_ids, *row.drafts]
                adjust(values, adjustment, tokens, row.request.num_prompt_tokens)
            if choice.min_p:
                least = values.max() + choice.temperature * np.log(choice.min_p)
                values[values < least] = -np.inf
        return paddle.to_tensor(changed, place=logits.place)
