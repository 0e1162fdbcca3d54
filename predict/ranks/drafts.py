"""Drafters of hidden states over ranks: each rank has one, and keeps the states of its own steps.

The front says of which rows the drafter's next step reads the states; no state goes to the front.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.engine.step import BlockCopies, Choices, Runner, StepTokens
from predict.nn.decoder import StepOutputs
from predict.nn.drafters import FED
from predict.nn.inputs import StepInputs
from predict.ranks.front import Ranks
from predict.ranks.messages import Down, array_names, text_array
from predict.ranks.shared import Arrays

if TYPE_CHECKING:
    from paddle import Tensor


class RanksFeed:
    """The feed of all ranks, as the front has it. See predict.nn.drafters.Feed."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def give(self, hidden: Mapping[str, Tensor], taps: Sequence[str], rows: Sequence[int]) -> None:
        """Names rows of the last step: of the drafter's where it fed the states, or the model's."""
        self._ranks.ask(Down.FEED, [text_array("\n".join(taps)), np.array(rows, np.int64)])


class StatesKept:
    """A runner that keeps the hidden states of its last step. See Runner."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.hidden: Mapping[str, Tensor] = {}
        self.num_ahead = runner.num_ahead

    @property
    def num_recorded(self) -> int:
        return self._runner.num_recorded

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        return self._runner.run(inputs, taps)

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        self.hidden = {}
        tokens = self._runner.launch(inputs, choices)
        self.hidden = tokens.hidden
        return tokens

    def copy_blocks(self, copies: BlockCopies) -> None:
        self._runner.copy_blocks(copies)


class RankFeed:
    """What one rank has of it."""

    def __init__(self, runners: Sequence[Runner], feed: Any):
        """runners: of the model, and of its drafter. feed: the drafter's."""
        self.runners = [StatesKept(each) for each in runners]
        self._feed = feed

    def answer(self, arrays: list[Any]) -> Arrays:
        """Does what a message says."""
        taps = array_names(arrays[0])
        hidden = self.runners[FED in taps].hidden
        self._feed.give(hidden, taps, arrays[1].tolist())
        return []
