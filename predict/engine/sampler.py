"""What each request wants of its next token: the sampling operator's inputs, and changed logits."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.stopping import suppressed_token_ids
from predict.request import Request

if TYPE_CHECKING:
    from paddle import Tensor


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
        return self.repetition != 1.0 or self.presence != 0.0 or self.frequency != 0.0


COLUMN_DTYPES: tuple[Any, ...] = (np.float32, np.int32, np.float32, np.int64, np.int64)
GREEDY = Choice(0.0, 1, 1.0, 0, 0)
UNCHANGED = Adjustment()


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
    logits[list(adjustment.banned)] = -np.inf


class Sampler:
    """Chooses the next token of each request that has a logit row."""

    def __init__(self, backend: ModuleType, seed: int, eos_token_ids: Sequence[int]):
        self.backend = backend
        self.seed = seed
        self.eos_token_ids = tuple(eos_token_ids)
        # By number of rows: five uploads are a tenth of a small model's step on the host.
        self._greedy_columns: dict[int, list[Tensor]] = {}

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        """Token ids, one per request, on the CPU; logits: [len(requests), vocab_size] float32."""
        choices = self.choices(requests)
        logits = self._process(logits, requests, choices)
        tokens: list[int] = self.backend.sample(logits, *self._columns(choices)).tolist()
        return tokens

    def choices(self, requests: Sequence[Request]) -> list[Choice]:
        """One per request; GREEDY itself for each that takes the largest logit."""
        choices: list[Choice] = []
        for request in requests:
            params = request.sampling_params
            if params.greedy:
                choices.append(GREEDY)
                continue
            seed = request_seed(self.seed, request)
            offset = request.num_output_tokens
            choices.append(
                Choice(params.temperature, params.top_k, params.top_p, seed, offset, params.min_p)
            )
        return choices

    def adjustments(self, requests: Sequence[Request]) -> list[Adjustment] | None:
        """One per request, UNCHANGED itself where there is none; None when nobody has one."""
        adjustments = [self._adjustment(request) for request in requests]
        return None if all(each is UNCHANGED for each in adjustments) else adjustments

    def _adjustment(self, request: Request) -> Adjustment:
        params = request.sampling_params
        banned = suppressed_token_ids(request.num_output_tokens, params, self.eos_token_ids)
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

    def _process(
        self, logits: Tensor, requests: Sequence[Request], choices: Sequence[Choice]
    ) -> Tensor:
        """Adjusted logits, those below min_p left out; the logits themselves if nobody asks."""
        import paddle

        adjustments = self.adjustments(requests)
        if adjustments is None and not any(choice.min_p for choice in choices):
            return logits
        rows = logits.numpy().copy()
        adjustments = adjustments or [UNCHANGED] * len(requests)
        for row, request, adjustment, choice in zip(
            rows, requests, adjustments, choices, strict=True
        ):
            if adjustment is not UNCHANGED:
                adjust(row, adjustment, request.token_ids, request.num_prompt_tokens)
            if choice.min_p:
                row[row < row.max() + choice.temperature * np.log(choice.min_p)] = -np.inf
        return paddle.to_tensor(rows, place=logits.place)
