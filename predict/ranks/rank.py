"""One rank: does what the front's messages say, in their order, and tells what it found."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from predict.device import communicator
from predict.engine.step import Network, Runner, StepTokens
from predict.errors import UserError
from predict.nn.decoder import FINAL, StepOutputs
from predict.nn.inputs import StepInputs
from predict.ranks.messages import (
    NUM_INPUTS,
    Down,
    Up,
    array_names,
    arrays_choices,
    arrays_step,
    text_array,
    tokens_arrays,
)
from predict.ranks.shared import Arrays, Channels, message, opened

if TYPE_CHECKING:
    from predict.ranks.front import Ready


Others = Mapping[Down, Callable[[list[Any]], Arrays]]
Told = Callable[[StepTokens, StepInputs], Arrays | None]


class Rank:
    """This process's end of the channels."""

    def __init__(self, channels: Channels, rank: int):
        self._channels, self.rank = channels, rank
        self._num_done = 0
        self._tells = threading.Lock()
        # What answers a launch, and waits for answers on their way: see predict.ranks.ahead.
        self.told: Told = _told
        self.settle: Callable[[], object] = lambda: None

    def got_on(self) -> None:
        """Notes progress: a step, a weight."""
        self._num_done += 1
        self._channels.progress.store(self.rank, self._num_done)

    def wait_for_start(self) -> int:
        """Waits until the front says that all may load; the threads that this one has."""
        kind, arrays = opened(self._channels.down.read(self.rank, _wait))
        assert kind == Down.START
        return int(cast("Any", arrays[0])[0])

    def tell(self, kind: Up, arrays: Arrays) -> None:
        """Sends a message to the front."""
        with self._tells:
            self._channels.up[self.rank].write(message(kind, arrays), _wait)

    def tell_failure(self, error: BaseException) -> None:
        """Says what went wrong here."""
        of_user = isinstance(error, UserError)
        text = str(error) if of_user else f"{type(error).__name__}: {error}"
        self.tell(Up.FAILED, [text_array(text), np.array([of_user], np.int64)])

    def tell_ready(self, ready: Ready) -> None:
        """Says that it is loaded."""
        self.tell(Up.READY, [np.array(ready, np.int64)])

    def serve(self, runners: Sequence[Runner], others: Others) -> None:
        """Answers messages until one fails that nothing answers. See `_done`."""
        known: list[dict[int, list[int]]] = [{} for _ in runners]
        while True:
            kind, arrays = opened(self._channels.down.read(self.rank, _wait))
            try:
                if kind not in (Down.LAUNCH, Down.COPY):
                    self.settle()
                given = cast("list[Any]", arrays)
                answer = _done(Down(kind), given, runners, known, others, self.told)
            except Exception as error:
                self.settle()
                self.tell_failure(error)
                if kind == Down.COPY:  # steps behind it would read what is not there
                    return
            else:
                if answer is not None and self.rank == 0:
                    self.tell(Up.ANSWER, answer)
            self.got_on()


def _done(
    kind: Down,
    arrays: list[Any],
    runners: Sequence[Runner],
    known: Sequence[dict[int, list[int]]],
    others: Others,
    told: Told,
) -> Arrays | None:
    """Does what a message says; what answers it.

    runners: of the model, and of its draft model. known: for each, see `arrays_choices`. others:
    what does the messages that are not of runners.
    """
    if kind in others:
        return others[kind](arrays)
    if kind == Down.COPY:
        runners[int(arrays[0][0])].copy_blocks([(a, b) for a, b in arrays[1].tolist()])
        return None
    which, inputs = arrays_step(arrays)
    if kind == Down.LAUNCH:
        tokens = runners[which].launch(inputs, arrays_choices(arrays[NUM_INPUTS:], known[which]))
        return told(tokens, inputs)
    taps = array_names(arrays[NUM_INPUTS])
    outputs = runners[which].run(inputs, taps)
    tensors = [outputs.logits, *(outputs.hidden[tap] for tap in taps)]
    return [None if each is None else each.cpu().astype("float32").numpy() for each in tensors]


def _told(tokens: StepTokens, inputs: StepInputs) -> Arrays:
    """The tokens of a step, once they are known."""
    return tokens_arrays(tokens.take(), tokens.logprobs())


class Compared:
    """A network that fails where its hidden states are not those of all ranks, bit for bit."""

    def __init__(self, network: Network, size: int):
        self._network, self._size = network, size

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        """See Network."""
        outputs = self._network.run(inputs, (*taps, FINAL))
        bits = outputs.hidden[FINAL].astype("float32").numpy().tobytes()
        own = np.frombuffer(hashlib.blake2b(bits, digest_size=8).digest(), np.int64)
        every = communicator.gather_ranks(own, self._size).ravel()
        if (every != every[0]).any():
            wrong = np.flatnonzero(every != every[0]).tolist()
            raise RuntimeError(f"hidden states of ranks {wrong} are not those of rank 0")
        return outputs


def _wait() -> None:
    """The front's end is this process's end: predict.ranks.life sees to it."""


class ToFront(logging.Handler):
    """Sends a rank's records of the log to the front."""

    def __init__(self, rank: Rank):
        super().__init__()
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Sends one."""
        level = np.array([record.levelno], np.int64)
        self._rank.tell(Up.NOTE, [level, text_array(record.getMessage())])
