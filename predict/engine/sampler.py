"""The choice of next tokens: changed logits, and the sampling operator's inputs."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predict.engine.beams import Candidates, likeliest, log_softmax, num_candidates
from predict.engine.choices import COLUMN_DTYPES, GREEDY, Choice, Row, request_seed
from predict.engine.logits_processors import UNCHANGED, Adjustment
from predict.engine.masks import GuideMasks

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.engine.window import WindowVerifier


class Sampler:
    """Chooses the next token of each request that has a logit row."""

    def __init__(
        self,
        backend: ModuleType,
        seed: int,
        eos_token_ids: Sequence[int],
        verifier: WindowVerifier | None = None,
    ):
        """verifier: accepts more drafts than exact verification."""
        self.backend = backend
        self.verifier = verifier
        self.seed = seed
        self.eos_token_ids = tuple(eos_token_ids)
        self.masks = GuideMasks()
        self._adjustments: dict[int, Adjustment] = {}  # by request id
        # By number of rows: five uploads are a tenth of a small model's step on the host.
        self._greedy_columns: dict[int, list[Tensor]] = {}

    def sample(self, logits: Tensor, rows: Sequence[Row]) -> list[int | Candidates]:
        """Token ids, one per row, on the CPU; -1 for a row that nothing can be drawn from.

        A beam's row gets candidates in place of a token. logits: [len(rows), vocab_size] float32.
        """
        import paddle

        beams = [index for index, row in enumerate(rows) if row.request.beam_group is not None]
        if not beams:
            return [*self._drawn(logits, rows)]
        values = logits.numpy()
        found: dict[int, int | Candidates] = {i: self._found(values[i], rows[i]) for i in beams}
        others = [index for index in range(len(rows)) if index not in found]
        if others:
            logits = paddle.to_tensor(values[others], place=logits.place)
            drawn = self._drawn(logits, [rows[index] for index in others])
            found.update(zip(others, drawn, strict=True))
        return [found[index] for index in range(len(rows))]

    def _found(self, logits: npt.NDArray[np.float32], row: Row) -> Candidates:
        """The likeliest continuations of a beam."""
        log_probs, request = logits.copy(), row.request
        log_softmax(log_probs)
        self._adjustment(row).apply(log_probs, request.token_ids, request.num_prompt_tokens)
        return likeliest(log_probs, self.num_candidates(row))

    def num_candidates(self, row: Row) -> int:
        """Tokens to find for a beam's row."""
        return num_candidates(row.request.sampling_params, self.eos_token_ids)

    def _drawn(self, logits: Tensor, rows: Sequence[Row]) -> list[int]:
        choices = self.choices(rows)
        logits = self._masked(self._adjusted(logits, rows), rows)
        tokens: list[int] = self.backend.sample(logits, *self._columns(choices)).tolist()
        if self.verifier is not None and any(row.drafts for row in rows):
            return self.verifier.verified(tokens, logits.numpy(), rows, choices)
        return tokens

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
                Choice(
                    *(params.temperature, params.top_k, params.top_p, seed, offset),
                    *(params.min_p, params.typical_p),
                )
            )
        return choices

    def adjustments(self, rows: Sequence[Row]) -> list[Adjustment] | None:
        """One per row, UNCHANGED itself where there is none; None if all are UNCHANGED."""
        adjustments = [self._adjustment(row) for row in rows]
        return None if all(each is UNCHANGED for each in adjustments) else adjustments

    def _adjustment(self, row: Row) -> Adjustment:
        request = row.request
        if not request.sampling_params.adjusts_logits:
            return UNCHANGED
        request_id = request.owner.request_id
        adjustment = self._adjustments.get(request_id)
        if adjustment is None:
            adjustment = Adjustment.of(request.sampling_params, self.eos_token_ids)
            self._adjustments[request_id] = adjustment
        return adjustment if row.num_output_tokens < adjustment.ends_at else UNCHANGED

    def forget(self, request_id: int) -> None:
        """Drops the state of an ended request."""
        self._adjustments.pop(request_id, None)

    def _columns(self, choices: Sequence[Choice]) -> list[Tensor]:
        """The sampling operator's inputs besides the logits."""
        import paddle

        all_greedy = all(choice is GREEDY for choice in choices)
        if all_greedy and len(choices) in self._greedy_columns:
            return self._greedy_columns[len(choices)]
        narrowed = any(choice.min_p or choice.typical_p < 1 for choice in choices)
        columns = [
            paddle.to_tensor(np.array([choice[index] for choice in choices], dtype))
            for index, dtype in enumerate(COLUMN_DTYPES if narrowed else COLUMN_DTYPES[:5])
        ]
        if all_greedy:
            self._greedy_columns[len(choices)] = columns
        return columns

    def _masked(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Logits without the tokens that guides forbid, changed in place."""
        import paddle

        masks = self.masks.of(rows, logits.shape[1])
        if masks is None:
            return logits
        return self.backend.mask_logits(logits, paddle.to_tensor(masks, place=logits.place))

    def _adjusted(self, logits: Tensor, rows: Sequence[Row]) -> Tensor:
        """Adjusted logits; the logits themselves without adjustments."""
        import paddle

        adjustments = self.adjustments(rows)
        if adjustments is None:
            return logits
        changed = logits.numpy().copy()
        for values, row, adjustment in zip(changed, rows, adjustments, strict=True):
            if adjustment is not UNCHANGED:
                tokens = [*row.request.token_ids, *row.drafts]
                adjustment.apply(values, tokens, row.request.num_prompt_tokens)
        return paddle.to_tensor(changed, place=logits.place)
