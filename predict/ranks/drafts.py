"""Drafters of hidden states over ranks: each rank has one, and the front proposes with all of them.

Hidden states of a step stay on the ranks, which take rows of them when the front asks; what goes
between are rows, as float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.device.place import tensor_at
from predict.engine.step import BlockCopies, Choices, Runner, StepTokens
from predict.nn.decoder import StepOutputs
from predict.nn.drafters import MedusaNetwork
from predict.nn.inputs import StepInputs
from predict.ranks.front import Ranks
from predict.ranks.messages import Down
from predict.ranks.shared import Arrays

if TYPE_CHECKING:
    from paddle import Tensor


class Task(IntEnum):
    """What a drafter is to do."""

    STATES = 1  # rows of the last step; their states answer
    RUN = 2  # inputs, states; the layers' output answers
    FED = 3  # an output; the next rows' states answer
    LOGITS = 4  # outputs or states, which of Medusa's heads; logits answer


class RanksDrafter:
    """A drafter as the front has it: a ChainNetwork, or a MedusaNetwork of `num_heads`."""

    def __init__(self, ranks: Ranks, taps: Sequence[str], num_heads: int):
        self._ranks, self.taps, self.num_heads = ranks, taps, num_heads

    def states(self, hidden: Mapping[str, Tensor], rows: Sequence[int]) -> Tensor:
        """Of these rows of the last step, whose hidden states the ranks have."""
        return self._asked(Task.STATES, [np.array(rows, np.int64)])

    def run(self, inputs: StepInputs, states: Tensor) -> Tensor:
        """See ChainNetwork."""
        return self._asked(Task.RUN, [*inputs, states.numpy()])

    def fed(self, output: Tensor) -> Tensor:
        """See ChainNetwork."""
        return self._asked(Task.FED, [output.numpy()])

    def logits(self, states: Tensor, head: int = 0) -> Tensor:
        """See ChainNetwork and MedusaNetwork."""
        return self._asked(Task.LOGITS, [states.numpy(), np.array([head], np.int64)])

    def _asked(self, task: Task, arrays: Arrays) -> Tensor:
        (found,) = self._ranks.ask(Down.DRAFT, [np.array([task], np.int64), *arrays])
        return tensor_at(found, None)


class RankDrafter:
    """What one rank has of it, and the model's runner, whose last hidden states it keeps."""

    def __init__(self, runner: Runner, network: Any, dtype: str):
        """network: a ChainNetwork or a MedusaNetwork."""
        self._runner, self._network, self._dtype = runner, network, dtype
        self._hidden: Mapping[str, Tensor] = {}
        self.num_ahead = runner.num_ahead

    @property
    def num_recorded(self) -> int:
        """See Runner."""
        return self._runner.num_recorded

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        """See Runner."""
        return self._runner.run(inputs, taps)

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        """See Runner."""
        self._hidden = {}
        tokens = self._runner.launch(inputs, choices)
        self._hidden = tokens.hidden
        return tokens

    def copy_blocks(self, copies: BlockCopies) -> None:
        """See Runner."""
        self._runner.copy_blocks(copies)

    def answer(self, arrays: list[Any]) -> Arrays:
        """Does what a message says."""
        import paddle

        task, *given = arrays
        network = self._network
        with paddle.no_grad():
            match Task(int(task[0])):
                case Task.STATES:
                    found = network.states(self._hidden, given[0].tolist())
                case Task.RUN:
                    found = network.run(StepInputs(*given[:-1]), self._tensor(given[-1]))
                case Task.FED:
                    found = network.fed(self._tensor(given[0]))
                case Task.LOGITS:
                    heads = given[1].tolist() if isinstance(network, MedusaNetwork) else []
                    found = network.logits(self._tensor(given[0]), *heads)
        return [found.astype("float32").numpy()]

    def _tensor(self, values: Any) -> Tensor:
        return tensor_at(values, None).astype(self._dtype)
