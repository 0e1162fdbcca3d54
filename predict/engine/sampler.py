"""Logits to tokens: penalties, then one call of the sampling operator for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.engine.stopping import suppressed_token_ids
from predict.request import Request

if TYPE_CHECKING:
    from paddle import Tensor

COLUMN_DTYPES: tuple[Any, ...] = (np.float32, np.int32, np.float32, np.int64, np.int64)
GREEDY_ROW = (0.0, 1, 1.0, 0, 0)


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
        logits = self._process(logits, requests)
        tokens: list[int] = self.backend.sample(logits, *self._columns(requests)).tolist()
        if min(tokens) < 0:  # a GPU cannot raise from within a step
            row = next(i for i, token in enumerate(tokens) if token < 0)
            raise ValueError(
                f"sample: row {row} (request {requests[row].request_id}) has no finite largest "
                "logit to draw from; the weights or the dtype do not suit the model"
            )
        return tokens

    def _columns(self, requests: Sequence[Request]) -> list[Tensor]:
        """Temperature, top_k, top_p, seed and offset of each row, for the sampling operator."""
        import paddle

        rows: list[tuple[float, int, float, int, int]] = []
        for request in requests:
            params = request.sampling_params
            if params.greedy:
                rows.append(GREEDY_ROW)
            else:
                seed = request_seed(self.seed, request)
                offset = request.num_output_tokens
                rows.append((params.temperature, params.top_k, params.top_p, seed, offset))
        all_greedy = all(row is GREEDY_ROW for row in rows)
        if all_greedy and len(rows) in self._greedy_columns:
            return self._greedy_columns[len(rows)]
        columns = [
            paddle.to_tensor(np.array(column, dtype))
            for column, dtype in zip(zip(*rows, strict=True), COLUMN_DTYPES, strict=True)
        ]
        if all_greedy:
            self._greedy_columns[len(rows)] = columns
        return columns

    def _process(self, logits: Tensor, requests: Sequence[Request]) -> Tensor:
        """Repetition penalty and minimum length; the logits themselves when nobody asks."""
        import paddle

        suppressed = [
            suppressed_token_ids(r.num_output_tokens, r.sampling_params, self.eos_token_ids)
            for r in requests
        ]
        penalties = [r.sampling_params.repetition_penalty for r in requests]
        if not any(suppressed) and all(penalty == 1.0 for penalty in penalties):
            return logits
        rows = logits.numpy().copy()
        for row, request, token_ids, penalty in zip(
            rows, requests, suppressed, penalties, strict=True
        ):
            if penalty != 1.0:
                apply_repetition_penalty(row, request.token_ids, penalty)
            row[list(token_ids)] = -np.inf
        return paddle.to_tensor(rows, place=logits.place)
