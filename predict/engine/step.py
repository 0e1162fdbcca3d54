"""A step as data: a network makes StepOutputs of StepInputs, a chooser StepTokens of Choices.

No request crosses into a runner: what it needs of one stands here. Imports no Paddle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from predict.engine.beams import Candidates
from predict.engine.choices import GREEDY, Choice
from predict.engine.logits_processors import Adjustment
from predict.engine.logprobs import LogprobTable
from predict.engine.window import WindowDrafts

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.decoder import StepOutputs
    from predict.nn.inputs import StepInputs


class Adjusted(NamedTuple):
    """A row whose logits are changed, and the tokens that this depends on."""

    adjustment: Adjustment
    sequence_id: int  # the same for all rows and steps of a sequence
    token_ids: Sequence[int]  # prompt and output, not a copy; unknown ones at the end
    num_known: int  # of these
    num_prompt_tokens: int
    drafts: Sequence[int]  # before the row


class PromptTargets(NamedTuple):
    """Tokens of prompts whose logprobs are wanted, one per row of logits behind the new tokens'."""

    token_ids: Sequence[int] = ()
    num_top: int = 0  # likeliest tokens to measure besides


NO_TARGETS = PromptTargets()


class Choices(NamedTuple):
    """How the first rows of a step's logits become tokens.

    fill_masks: writes what guides allow into [R, W] (see ops.mask_logits); called once the tokens
    before the rows are known. waits: they are not when the step is launched. taps: hidden states
    that are wanted besides (predict.nn.decoder.check_taps).
    """

    rows: Sequence[Choice]
    adjusted: Sequence[Adjusted | None] | None = None  # per row; None: no row is changed
    candidates: Mapping[int, int] = MappingProxyType({})  # by row of a beam, how many it wants
    num_top: int | None = None  # likeliest tokens to measure; None: no logprobs are wanted
    prompt: PromptTargets = NO_TARGETS
    window: WindowDrafts | None = None  # drafts to verify so
    fill_masks: Callable[[npt.NDArray[np.int32]], None] | None = None
    waits: bool = False
    taps: Sequence[str] = ()

    @property
    def changes_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the network's."""
        return self.adjusted is not None or self.fill_masks is not None or bool(self.candidates)


def are_largest(choices: Choices) -> bool:
    """Whether tokens are those of the largest logits, and nothing else is wanted of these."""
    beside = (choices.num_top is not None, choices.prompt.token_ids, choices.candidates)
    if any(beside) or choices.window is not None:
        return False
    return all(choice is GREEDY for choice in choices.rows)


class Logprobs(NamedTuple):
    """Logprobs of a step's new tokens and of prompts' tokens; None where they are not wanted."""

    tokens: LogprobTable | None = None  # a row per Row of the step
    prompt: LogprobTable | None = None  # a row per target

    def copied(self) -> Logprobs:
        """A copy: the runner reuses the memory of these arrays some launches later."""
        copies = (table and LogprobTable(*(array.copy() for array in table)) for table in self)
        return Logprobs(*copies)


class StepTokens(Protocol):
    """The tokens of a step that may still run.

    hidden: by tap, [T, H] of all tokens of the step.
    """

    hidden: Mapping[str, Tensor] = MappingProxyType({})

    def choose(self) -> None:
        """Queues what waits for the previous step's tokens: the choice under guides' masks.

        Called when those tokens are written back.
        """
        return

    def take(self) -> list[int | Candidates]:
        """Waits for the tokens; -1 for a row that nothing could be drawn from. Called once.

        A beam's row has Candidates, empty where nothing could be found.
        """

    def known(self, drafts: Sequence[int]) -> list[int]:
        """The step's drafts with tokens in place of placeholders; called after `take`.

        -1 for a draft that could not be drawn.
        """

    def logprobs(self) -> Logprobs:
        """Logprobs of the new tokens and of the prompts' tokens; called after `take`."""


class KnownTokens(StepTokens):
    """Tokens, or placeholders, that the host need not wait for."""

    def __init__(self, token_ids: Sequence[int | Candidates], logprobs: Logprobs):
        self.token_ids = list(token_ids)
        self._logprobs = logprobs

    def take(self) -> list[int | Candidates]:
        return self.token_ids

    def known(self, drafts: Sequence[int]) -> list[int]:
        return list(drafts)

    def logprobs(self) -> Logprobs:
        return self._logprobs


class Followed(NamedTuple):
    """The drafts of one request that a running step verifies."""

    row: int  # of its logits, behind the request's last known token
    drafts: Sequence[int]  # placeholders


BlockCopies = Sequence[tuple[int, int]]
CopyBlocks = Callable[[BlockCopies], None]


class Network(Protocol):
    """A network over its own caches."""

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        """Outputs of NumPy inputs; writes the step's keys and values.

        taps: the hidden states to return (see predict.nn.decoder.check_taps). Raises UserError
        where this network has none of these.
        """


class Runner(Network, Protocol):
    """Runs steps: a network, and a chooser behind it.

    num_ahead: steps that may be launched before the oldest one's tokens are taken; their inputs
    then hold placeholders (see Scheduler.advance).
    """

    num_ahead: int

    @property
    def num_recorded(self) -> int:
        """Graphs recorded so far; the step that records one takes longer than later ones."""

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        """Starts a step of NumPy inputs, whose first rows of logits are those of `choices`."""

    def copy_blocks(self, copies: BlockCopies) -> None:
        """Copies cache blocks before the next step: (from, to), no block both."""
