"""How each request's next token is to be chosen: from the rows of a step to its Choices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from predict.engine.beams import num_candidates
from predict.engine.choices import GREEDY, Choice, Row, request_seed
from predict.engine.logits_processors import UNCHANGED, Adjustment
from predict.engine.masks import GuideMasks, is_guided
from predict.engine.request_state import num_wanted
from predict.engine.step import NO_TARGETS, Adjusted, Choices, PromptTargets
from predict.engine.window import WindowDrafts, loose_drafts


class Sampler:
    """Makes Choices of requests."""

    def __init__(
        self,
        seed: int,
        eos_token_ids: Sequence[int],
        window: tuple[int, int] | None = None,
    ):
        """window: of window verification, and its max_candidate_len; None: drafts are exact."""
        self.seed = seed
        self.eos_token_ids = tuple(eos_token_ids)
        self.masks = GuideMasks()
        self._window = window
        self._adjustments: dict[int, Adjustment] = {}  # by request id

    def choices(self, rows: Sequence[Row], prompt: PromptTargets = NO_TARGETS) -> Choices:
        """The choices of a step's rows, and of the targets behind them."""
        choices = self._rows(rows)
        window, fill_masks, waits = None, None, False
        if self._window is not None and any(row.drafts for row in rows):
            window = WindowDrafts(*self._window, loose_drafts(rows, choices))
        if is_guided(rows):
            fill_masks = partial(self.masks.fill, rows)
            waits = any(row.request.guide and row.request.num_placeholders for row in rows)
        return Choices(
            choices,
            self._adjusted(rows),
            {
                index: num_candidates(row.request.sampling_params, self.eos_token_ids)
                for index, row in enumerate(rows)
                if row.request.beam_group is not None
            },
            num_wanted([row.request for row in rows]),
            prompt,
            window,
            fill_masks,
            waits,
        )

    def _rows(self, rows: Sequence[Row]) -> list[Choice]:
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

    def _adjusted(self, rows: Sequence[Row]) -> list[Adjusted | None] | None:
        """One per row, None where its logits stay; None if all of them do."""
        if not any(row.request.sampling_params.adjusts_logits for row in rows):
            return None
        adjusted = [self._adjusted_row(row) for row in rows]
        return adjusted if any(adjusted) else None

    def _adjusted_row(self, row: Row) -> Adjusted | None:
        adjustment, request = self._adjustment(row), row.request
        if adjustment is UNCHANGED:
            return None
        known = request.num_known_tokens
        return Adjusted(
            *(adjustment, request.request_id, request.token_ids, known),
            *(request.num_prompt_tokens, row.drafts),
        )

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


class UnadjustedSampler(Sampler):
    """Leaves logits as they are.

    For drafts, where penalties would read tokens that the target's steps alone write.
    """

    def _adjusted(self, rows: Sequence[Row]) -> None:
        """None: drafts are chosen without penalties."""
