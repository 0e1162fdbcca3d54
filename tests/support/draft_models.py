"""A draft model that reads its own cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from predict.engine.drafts import FAILED, accepted_tokens
from predict.engine.step import BlockCopies, Followed, KnownTokens, Logprobs
from predict.nn.inputs import StepInputs

BLOCK = 16
VOCABULARY = 50
SHELF = -1000  # the first placeholder of a draft


def next_token(history: list[int]) -> int:
    """The stand-in's choice: now and then a function of all tokens before it, else of the last."""
    total = sum((index + 1) * token for index, token in enumerate(history))
    return total % VOCABULARY if total % 7 == 0 else (history[-1] + 1) % 4


class ReadTokens(KnownTokens):
    """Those of a CacheReader; placeholders stand for what was on its shelf."""

    def __init__(self, token_ids: list[int], shelf: list[int]):
        super().__init__(token_ids, Logprobs())
        self.shelf = shelf

    def known(self, drafts: Sequence[int]) -> list[int]:
        return [draft if draft > SHELF else self.shelf[SHELF - draft] for draft in drafts]


class CacheReader:
    """A runner that keeps token ids in a paged cache and chooses by those that it reads there."""

    def __init__(
        self,
        num_blocks: int,
        ahead: bool,
        mistakes: float = 0.0,
        target: CacheReader | None = None,
        failures: float = 0.0,
    ):
        """mistakes: share of choices that are others; failures: that cannot be drawn.

        target: on whose shelf the tokens of this, a draft model's, are left.
        """
        self.cache = np.full(num_blocks * BLOCK, -1000)
        self.target = target
        self.shelf: list[int] = []
        self.used: list[int] = []  # what was on the shelf for the last step
        self.num_followed = 0
        self.failures = failures
        self.mistakes = mistakes
        self.random = np.random.default_rng(0)
        self.num_ahead = int(ahead)
        self.num_recorded = 0
        self.last: list[int] = []
        self.num_tokens = 0

    def launch(self, inputs: StepInputs, choices: Any) -> KnownTokens:
        shelf, self.used, self.shelf = self.shelf, self.shelf, []
        tokens = ReadTokens([], shelf).known(
            [self.last[-1 - t] if SHELF < t < 0 else t for t in inputs.token_ids.tolist()]
        )
        self.num_tokens += len(tokens)
        self.cache[inputs.slot_mapping] = tokens
        chosen = []
        for index in inputs.logit_indices.tolist():
            span = int(np.searchsorted(inputs.cu_seqlens_q, index, side="right")) - 1
            places = np.arange(int(inputs.positions[index]) + 1)
            slots = inputs.block_tables[span][places // BLOCK] * BLOCK + places % BLOCK
            token = next_token(self.cache[slots].tolist())
            token ^= int(self.random.random() < self.mistakes)
            chosen.append(FAILED if self.random.random() < self.failures else token)
        self.last = chosen
        if self.target is None:
            return ReadTokens(chosen, shelf)
        first = SHELF - len(self.target.shelf)
        self.target.shelf += chosen
        return ReadTokens(list(range(first, first - len(chosen), -1)), [])

    def launch_behind(
        self, inputs: StepInputs, choices: Any, followed: Sequence[Followed], num_chosen: int
    ) -> KnownTokens:
        target = self.target
        assert target is not None
        borders = inputs.cu_seqlens_q
        for index, (row, placeholders) in enumerate(followed):
            span = slice(int(borders[index]), int(borders[index + 1]))
            drafts = ReadTokens([], target.used).known(placeholders)
            new = accepted_tokens(drafts, target.last[row:])
            if num_chosen:
                last = [int(inputs.token_ids[span.start]), *new][-2:]
                inputs.token_ids[span] = last
            places = inputs.positions[span]
            places -= len(drafts) + 1 - len(new)
            blocks = inputs.block_tables[index][places // BLOCK]
            inputs.slot_mapping[span] = blocks * BLOCK + places % BLOCK
        self.num_followed += 1
        return self.launch(inputs, choices)

    def run(self, inputs: StepInputs, taps: Any = ()) -> Any:
        raise NotImplementedError

    def copy_blocks(self, copies: BlockCopies) -> None:
        raise NotImplementedError


def expected(tokens: Sequence[int], count: int) -> list[int]:
    history = list(tokens)
    for _ in range(count):
        history.append(next_token(history))
    return history[len(tokens) :]
