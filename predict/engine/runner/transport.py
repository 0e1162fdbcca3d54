"""Tokens on their way: from a GPU to the host, and from one step to another on the device.

New tokens stay on the device for the next step (see Scheduler.advance), and are copied to pinned
memory, which the host reads later. So are logprobs, measured behind the step on unchanged logits.
A draft model's tokens stay on the device alone (see Shelf), and reach the host with the tokens of
the step that verifies them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.engine.beams import Candidates
from predict.engine.logprobs import LogprobTable
from predict.engine.step import KnownTokens, Logprobs, StepTokens

if TYPE_CHECKING:
    from paddle import Tensor


class TokenRing:
    """Copies of tokens from the device to the host, in slots that are used in turn."""

    def __init__(self, size: int, stream: int, num_slots: int):
        """size: tokens of a step, at most. num_slots: steps whose tokens may be on their way."""
        self._stream = stream
        self._arrays = [cuda.pinned([size], np.int32) for _ in range(num_slots)]
        self._events = [cuda.Event() for _ in range(num_slots)]
        # Pinned from the first logprobs on.
        self._measured = [np.empty(0, np.int32) for _ in range(num_slots)]
        self._next = 0

    def send(
        self,
        tokens: Tensor,
        num_rows: int,
        measured: Sequence[Tensor | None] = (),
        num_named: int = 0,
    ) -> TokensOnTheirWay:
        """Queues the copies of the first `num_rows` tokens, and of results of ops.logprobs.

        measured: of the new tokens and of prompts' tokens, None where not wanted. num_named: tokens
        up to the last that a placeholder of the step refers to.
        """
        slot = self._next
        array, event = self._arrays[slot][: max(num_rows, num_named)], self._events[slot]
        self._next = (slot + 1) % len(self._events)
        cuda.copy_front_to_host(array, tokens, self._stream)
        num_measured = sum(tensor.size for tensor in measured if tensor is not None)
        if len(self._measured[slot]) < num_measured:
            self._measured[slot] = cuda.pinned([2 * num_measured], np.int32)
        tables: list[npt.NDArray[np.int32] | None] = []
        start = 0
        for tensor in measured:
            if tensor is None:
                tables.append(None)
                continue
            table = self._measured[slot][start : start + tensor.size]
            cuda.copy_front_to_host(table, tensor, self._stream)
            tables.append(table.reshape(tensor.shape))
            start += tensor.size
        event.record(self._stream)
        return TokensOnTheirWay(array, num_rows, event, tables)


class TokensOnTheirWay(StepTokens):
    """Tokens of a step whose copy to the host may not have arrived."""

    def __init__(
        self,
        array: npt.NDArray[np.int32],
        num_rows: int,
        event: cuda.Event,
        tables: Sequence[npt.NDArray[np.int32] | None] = (),
    ):
        self._array = array
        self._num_rows = num_rows
        self._event = event
        self._tables = tables
        self._tokens: list[int] = []

    def take(self) -> list[int | Candidates]:
        self._event.synchronize()
        self._tokens = self._array.tolist()
        return [*self._tokens[: self._num_rows]]

    def known(self, drafts: Sequence[int]) -> list[int]:
        return [draft if draft >= 0 else self._tokens[-1 - draft] for draft in drafts]

    def logprobs(self) -> Logprobs:
        return Logprobs(*(None if table is None else read_table(table) for table in self._tables))


class BeamTokensOnTheirWay(StepTokens):
    """Tokens of a step in which the rows `beams` have Candidates.

    found: [2, B, K] of ops.likeliest, pinned; its copy is queued before that of the tokens.
    """

    def __init__(self, tokens: StepTokens, found: npt.NDArray[np.int32], beams: Sequence[int]):
        self._tokens = tokens
        self._found = found
        self._beams = beams

    def take(self) -> list[int | Candidates]:
        tokens = self._tokens.take()
        token_ids, values = self._found[0], self._found[1].view(np.float32)
        for row, ids, log_probs in zip(self._beams, token_ids, values, strict=True):
            num_found = int((ids >= 0).sum())
            tokens[row] = Candidates(ids[:num_found].tolist(), log_probs[:num_found].tolist())
        return tokens

    def known(self, drafts: Sequence[int]) -> list[int]:
        return self._tokens.known(drafts)

    def logprobs(self) -> Logprobs:
        return self._tokens.logprobs()


class Shelf:
    """Tokens that a draft model's steps leave on the device for the target's next step.

    They lie behind the tokens of the target's last step, where placeholders refer to them, in two
    halves: while the target verifies one half, the next drafts go to the other.
    """

    def __init__(self, tokens: Tensor, first: int, stream: int):
        """tokens: the target's, int32; free from index `first` on."""
        self.tokens = tokens
        self._address, self._size = tokens.data_ptr(), (len(tokens) - first) // 2
        self._first = self._next = first
        self._other = first + self._size
        self._stream = stream

    def turn(self) -> None:
        """Switches halves: queued work reads this one, and is done with the other."""
        self._first, self._other = self._other, self._first
        self._next = self._first

    def send(self, tokens: Tensor, num_rows: int) -> KnownTokens:
        """Queues the copy of the first `num_rows` tokens; their placeholders in the target."""
        if self._next + num_rows > self._first + self._size:
            self._next = self._first  # overwrites a proposal that no step used
        start = self._next
        self._next += num_rows
        target = self._address + 4 * start
        cuda.copy_bytes(target, tokens.data_ptr(), 4 * num_rows, self._stream)
        return KnownTokens(range(-1 - start, -1 - start - num_rows, -1), Logprobs())


def read_table(measured: npt.NDArray[np.int32]) -> LogprobTable:
    """The table that ops.logprobs returned: [L, 2 + 2K]."""
    num_top = measured.shape[1] // 2 - 1
    floats = measured.view(np.float32)
    return LogprobTable(
        floats[:, 0], measured[:, 1], measured[:, 2 : 2 + num_top], floats[:, 2 + num_top :]
    )


class WaitingTokens(StepTokens):
    """Tokens of a step whose choice waits for `choose`."""

    def __init__(self, choose: Callable[[], StepTokens]):
        """choose: queues the choice."""
        self._choose: Callable[[], StepTokens] | None = choose
        self._tokens: StepTokens | None = None

    def choose(self) -> None:
        if self._choose is not None:
            self._tokens, self._choose = self._choose(), None

    @property
    def _chosen(self) -> StepTokens:
        if self._tokens is None:
            raise RuntimeError("tokens are taken before they are chosen")
        return self._tokens

    def take(self) -> list[int | Candidates]:
        return self._chosen.take()

    def known(self, drafts: Sequence[int]) -> list[int]:
        return self._chosen.known(drafts)

    def logprobs(self) -> Logprobs:
        return self._chosen.logprobs()
