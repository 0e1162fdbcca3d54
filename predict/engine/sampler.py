"""What each request wants of its next token: the sampling operator's inputs, and changed logits."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.engine.stopping import suppressed_token_ids
from predict.request import Request, SamplingParams

if TYPE_CHECKING:
    from paddle import Tensor


class Choice(NamedTuple):
    """How one row of logits becomes a token, in the order of the sampling operator's inputs."""

    temperature: float  # 0: the largest logit
    top_k: int  # 0: all
    top_p: float
    seed: int
    offset: int


COLUMN_DTYPES: tuple[Any, ...] = (np.float32, np.int32, np.float32, np.int64, np.int64)
GREEDY = Choice(0.0, 1, 1.0, 0, 0)


def request_seed(engine_seed: int, request: Request) -> int:
    """The request's own seed, or one made from the engine's seed and the request's number."""
    if request.sampling_params.seed is not None:
        return request.sampling_params.seed
    return (engine_seed * 0x9E3779B97F4A7C15 + request.request_id + 1) & (1 << 63) - 1


def apply_repetition_penalty(
    logits: npt.NDArray[np.float32], token_ids: Sequence[int], penalty: float
) -> None:
    """Makes seen tokens less likely: divides positive and multiplies negative logits.

    logits: [vocab_size], modified. token_ids: prompt and output so far, as HF transformers counts
    them. Source: Keskar et al. 2019 (CTRL).
    """
    seen = np.unique(np.asarray(token_ids))
    values = logits[seen]
    logits[seen] = np.where(values < 0, values * penalty, values / penalty)


class Sampler:
    """Chooses the next token of each request that has a logit row."""

    def __init__(self, backend: ModuleType, seed: int, eos_token_ids: Sequence[int]):
        self.backend = backend
        self.seed = seed
        self.eos_token_ids = tuple(eos_token_ids)
        # By number of rows: five uploads are a tenth of a small model's step on the host.
        self._greedy_columns: dict[int, list[Tensor]] = {}

    def sample(self, logits: Tensor, requests: Sequence[Request]) -> list[int]:
        """Token ids, one per request; logits: [len(requests), vocab_size] float32."""
        logits = self.process(logits, requests)
        tokens: list[int] = self.backend.sample(logits, *self._columns(requests)).tolist()
        return tokens

    def choices(self, requests: Sequence[Request]) -> list[Choice]:
        """One per request; GREEDY itself for each that takes the largest logit."""
        choices: list[Choice] = []
        for request in requests:
            params = request.sampling_params
            if params.greedy:
                choices.append(GREEDY)
            else:
                seed = request_seed(self.seed, request)
                offset = request.num_output_tokens
                choices.append(Choice(params.temperature, params.top_k, params.top_p, seed, offset))
        return choices

    def _columns(self, requests: Sequence[Request]) -> list[Tensor]:
        """The sampling operator's inputs besides the logits."""
        import paddle

        rows = self.choices(requests)
        all_greedy = all(row is GREEDY for row in rows)
        if all_greedy and len(rows) in self._greedy_columns:
            return self._greedy_columns[len(rows)]
        columns = [
            paddle.to_tensor(np.array(column, dtype))
            for column, dtype in zip(zip(*rows, strict=True), COLUMN_DTYPES, strict=True)
        ]
        if all_greedy:
            self._greedy_columns[len(rows)] = columns
        return columns

    @staticmethod
    def changes_logits(params: SamplingParams) -> bool:
        """Whether `process` may change the request's logits, by tokens that must be known."""
        return params.repetition_penalty != 1.0 or params.min_length > 0

    def process(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Repetition penalty and minimum length; the logits themselves when nobody asks."""
        import paddle

        if not any(self.changes_logits(request.sampling_params) for request in requests):
            return logits
        rows = logits.numpy().copy()
        for row, request in zip(rows, requests, strict=True):
            params = request.sampling_params
            if params.repetition_penalty != 1.0:
                apply_repetition_penalty(row, request.token_ids, params.repetition_penalty)
            suppressed = suppressed_token_ids(request.num_output_tokens, params, self.eos_token_ids)
            row[list(suppressed)] = -np.inf
        return paddle.to_tensor(rows, place=logits.place)
