"""The ranks of a model, as the process that asks them has them: started, watched, ended.

Ranks are processes of this machine. All get every message, run the same steps in the same order,
and exchange partial sums through memory that they share; rank 0 answers. Where one of them dies,
fails, or gets nowhere, all end. Imports no Paddle.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from predict.device.place import tensor_at
from predict.engine.step import BlockCopies, Choices, StepTokens
from predict.errors import EngineError, UserError
from predict.nn.decoder import StepOutputs
from predict.nn.inputs import StepInputs
from predict.ranks.life import (
    LOOK_SECONDS,
    Clock,
    State,
    peak_bytes_of,
    state_of,
    stop_alone,
    stop_together,
)
from predict.ranks.messages import (
    Down,
    Up,
    array_text,
    arrays_tokens,
    choices_arrays,
    sent_behind,
    step_arrays,
    text_array,
)
from predict.ranks.shared import LINE, Arrays, Channels, message, opened
from predict.system.notes import LOG

# The memory file of sums: SharedWords in csrc/include/regatta/communicator.h.
MOST_RANKS, SLOT_BYTES = 64, 1 << 18
# Seconds of computing that count as progress, and their part of the timeout: waiting takes less.
LEAST_SECONDS, LEAST_PART = 0.02, 0.005
BUSY = "RD"  # states of a process that runs, or reads a disk
FAIL_SECONDS = 2.0  # in which all ranks fail, where one does by what it was asked for


# As -m does, but for files of the working directory, which are not ours to import.
RUN_MODULE = """import sys
if sys.path[0] == "":
    del sys.path[0]
import runpy
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)"""


class Ready(NamedTuple):
    """What a rank says once it is loaded."""

    num_blocks: int  # of its caches, the same for all
    num_slots: int  # of states, the same for all
    weight_bytes: int


class _Group:
    """The processes, and the thread that starts and watches them: they end with that thread."""

    def __init__(self, settings: Mapping[str, Any], size: int, timeout: float, module: str):
        self.size, self.timeout = size, timeout
        self.failure: str | None = None  # why all have ended
        self.is_asked = False  # whether they have something to do: they load, or a step runs
        self.on_failure: Callable[[], None] = lambda: None
        self.processes: list[subprocess.Popen[bytes]] = []
        fds = [Channels.create(size), os.memfd_create("regatta-sums"), os.memfd_create("config")]
        os.truncate(fds[1], _sums_bytes(size))
        os.write(fds[2], json.dumps(settings).encode())
        self.channels = Channels.open(fds[0], size)
        self._sums = mmap.mmap(fds[1], LINE * (1 + size))
        words = map(str, (module, *fds, size, os.getpid()))
        self._arguments = [sys.executable, "-c", RUN_MODULE, *words]
        self._fds = fds
        self._closing, self._started = threading.Event(), threading.Event()
        stop_together(self._living)
        self._thread = threading.Thread(target=self._run, name="regatta-ranks", daemon=True)
        self._thread.start()
        self._started.wait()
        for fd in fds:
            os.close(fd)

    def _run(self) -> None:
        try:
            for rank in range(self.size):
                self.processes.append(
                    subprocess.Popen(
                        [*self._arguments, str(rank)],
                        pass_fds=self._fds,
                        stdin=subprocess.DEVNULL,
                        stdout=2,  # answers are the front's
                        env=_environment(self.size),
                    )
                )
        except OSError as error:
            self.failure = f"rank {len(self.processes)} cannot be started: {error}"
        self._started.set()
        watch = _Watch(self)
        while self.failure is None and not self._closing.wait(LOOK_SECONDS):
            found = watch.look()
            self.failure = self.failure or found  # which the front may have set meanwhile
        self._end()
        if self.failure is not None:
            self.on_failure()

    def arrived(self, rank: int) -> int:
        """Exchanges that a rank has brought its part to."""
        at = LINE * (1 + rank)
        return int.from_bytes(self._sums[at : at + 4], "little")

    def _end(self) -> None:
        self._sums[:4] = b"\x01\0\0\0"
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def close(self) -> None:
        """Ends the processes; returns when they have ended."""
        self._closing.set()
        self._thread.join()
        stop_alone(self._living)

    def _living(self) -> list[int]:
        return [process.pid for process in self.processes if process.poll() is None]


class _Watch:
    """Looks at the processes of a group again and again.

    A rank gets on where its counts change, where it computes, runs or reads a disk. One that waits
    for another does not, which is no fault: all must wait, or one be stopped by a signal.
    """

    def __init__(self, group: _Group):
        self._group, self._clock = group, Clock()
        # Of each rank: its counts, seconds of computing, and when they changed.
        self._marks: list[tuple[tuple[int, int], float, float]] = [((-1, -1), 0.0, 0.0)]
        self._marks *= group.size

    def look(self) -> str | None:
        """Why all must end; None where all is well."""
        group, now = self._group, self._clock.tick()
        for rank, process in enumerate(group.processes):
            status = process.poll()
            if status is not None:
                return f"rank {rank} (process {process.pid}) {_how(status)}, and so all ranks end"
        states = [state_of(process.pid) for process in group.processes]
        seconds = [self._waited(rank, state, now) for rank, state in enumerate(states)]
        stopped = [rank for rank, state in enumerate(states) if state.is_stopped]
        late = [rank for rank in stopped if seconds[rank] > group.timeout]
        if not late and min(seconds) > group.timeout:
            late = list(range(group.size))
        if not late:
            return None
        rank = min(late, key=group.arrived)
        return (
            f"rank {rank} (process {group.processes[rank].pid}) made no progress for "
            f"{group.timeout:g} s (--rank_timeout)"
            f"{', and is stopped by a signal' if rank in stopped else ''}; all ranks end"
        )

    def _waited(self, rank: int, state: State, now: float) -> float:
        """Seconds in which a rank that has something to do has not got on."""
        group = self._group
        counts = (group.channels.progress.load(rank), group.arrived(rank))
        known, computed, since = self._marks[rank]
        computes = state.cpu_seconds - computed > LEAST_SECONDS + LEAST_PART * group.timeout
        is_idle = not group.is_asked and not state.is_stopped
        if counts != known or computes or is_idle or state.letter in BUSY:
            self._marks[rank] = counts, state.cpu_seconds, now
            return 0.0
        return now - since


class Ranks:
    """The ranks of one model. Not thread-safe. They end with this object, and with the process."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        size: int,
        timeout: float,
        module: str = "predict.rank_process",
    ):
        """Starts them. settings: of EngineConfig. timeout: seconds without progress."""
        self._group = group = _Group(settings, size, timeout, module)
        self.size, self._channels = size, group.channels
        self._early: list[deque[Arrays]] = [deque() for _ in range(size)]  # read, and not asked for
        self._num_asked = 0  # answers of rank 0 that are not read
        self.settle: Callable[[], None] = lambda: None  # reads what is on its way
        self.close = weakref.finalize(self, group.close)

    @property
    def process_ids(self) -> list[int]:
        """Of each rank."""
        return [process.pid for process in self._group.processes]

    def call_on_failure(self, call: Callable[[], None]) -> None:
        """Has `call` called, on another thread, where the ranks end by themselves."""
        self._group.on_failure = call

    def check(self) -> None:
        """Raises EngineError where the ranks have ended."""
        if self._group.failure is not None:
            raise EngineError(self._group.failure)
        if not self.close.alive:
            raise EngineError("the ranks were ended")

    def load(self, num_cores: int) -> None:
        """Has them load: until then they do what needs no front. num_cores: for all together."""
        self._group.is_asked = True
        self.send(Down.START, [np.array([max(num_cores // self.size, 1)], np.int64)])

    def ready(self) -> list[Ready]:
        """Waits until all are loaded. Raises UserError and EngineError; then all have ended."""
        try:
            answers = [self._answer(rank) for rank in range(self.size)]
        except RankFailed as error:
            self.close()
            if error.of_user:
                raise UserError(str(error)) from None
            raise EngineError(f"rank {error.rank} failed while loading: {error}") from None
        except BaseException:
            self.close()
            raise
        self._group.is_asked = False
        return [Ready(*cast(Any, counts).tolist()) for (counts,) in answers]

    def send(self, kind: Down, arrays: Arrays) -> None:
        """Sends a message that nothing answers."""
        self.check()
        parts = message(kind, arrays)
        with self._unbroken():
            self._channels.down.write(parts, self.check)

    def ask(self, kind: Down, arrays: Arrays) -> Arrays:
        """What rank 0 answers to a message.

        Raises what all ranks raised in its course, and EngineError where they cannot go on.
        """
        self.settle()
        self.post(kind, arrays)
        try:
            return self.answer()
        except RankFailed as error:
            with self._unbroken():
                self._check_others_failed(error)
            if error.of_user:
                raise UserError(str(error)) from None
            raise RuntimeError(str(error)) from None

    def post(self, kind: Down, arrays: Arrays) -> None:
        """Sends a message that `answer` is to read the answer of."""
        self.check()
        parts = message(kind, arrays)
        self._num_asked += 1
        self._group.is_asked = True
        with self._unbroken():
            self._channels.down.write(parts, self.check)

    def answer(self) -> Arrays:
        """The next answer of rank 0. Raises RankFailed of any rank, and EngineError."""
        try:
            with self._unbroken():
                return self._answer(0)
        finally:
            self._num_asked -= 1
            self._group.is_asked = self._num_asked > 0

    def end(self, failed: RankFailed) -> EngineError:
        """Ends all, since a rank has failed; the error that says so."""
        self._group.failure = f"rank {failed.rank} failed, and so all ranks end: {failed}"
        self.close()
        return EngineError(self._group.failure)

    @contextlib.contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Ends all where a signal breaks an exchange off: the next answer would be this one's."""
        try:
            yield
        except (RankFailed, EngineError):
            raise
        except BaseException as error:
            name = type(error).__name__
            self._group.failure = f"{name} broke a step off, and so all ranks end; load it again"
            self.close()
            raise

    def _answer(self, rank: int) -> Arrays:
        """The next message of a rank that is no note. Raises RankFailed of any rank."""

        def look() -> None:
            self.check()
            for other in range(self.size):
                if other != rank and self._channels.up[other].has_message():
                    self._early[other].append(self._next(other, self.check))

        early = self._early[rank]
        return early.popleft() if early else self._next(rank, look)

    def _next(self, rank: int, look: Callable[[], None]) -> Arrays:
        """Reads the next message of a rank that is no note. Raises RankFailed of this rank."""
        while True:
            kind, arrays = opened(self._channels.up[rank].read(0, look))
            if kind == Up.FAILED:
                raise RankFailed(rank, array_text(arrays[0]), bool(cast(Any, arrays[1])[0]))
            if kind != Up.NOTE:
                return arrays
            level = int(cast(Any, arrays[0])[0])
            LOG.log(level, f"rank {rank}: {array_text(arrays[1])}")

    def _check_others_failed(self, first: RankFailed) -> None:
        """Raises EngineError unless all ranks failed alike: then they can go on together."""
        deadline = time.monotonic() + FAIL_SECONDS

        def look() -> None:
            self.check()
            if time.monotonic() > deadline:
                raise TimeoutError

        for rank in range(self.size):
            if rank == first.rank:
                continue
            try:
                self._next(rank, look)
            except RankFailed:
                continue
            except TimeoutError:
                pass
            self._group.failure = f"rank {first.rank} failed alone: {first}"
            self.close()
            raise EngineError(self._group.failure)


class RankFailed(Exception):  # noqa: N818  # what a rank says of itself
    """A rank could not do what it was asked for."""

    def __init__(self, rank: int, text: str, of_user: bool):
        super().__init__(text)
        self.rank, self.of_user = rank, of_user


class RanksRunner:
    """Runs steps on all ranks: each is over when `launch` returns. See Runner."""

    num_ahead = 0
    num_recorded = 0

    def __init__(self, ranks: Ranks, vocab_size: int, weight_bytes: int, which: int = 0):
        """which: 0 for the model, 1 for the draft model. vocab_size: of its logits.

        weight_bytes: of all ranks together.
        """
        self._ranks, self._vocab_size, self._which = ranks, vocab_size, which
        self.weight_bytes = weight_bytes
        self._sent: Mapping[int, int] = {}
        self._hidden: dict[str, Any] = {}  # by tap; the states are not here

    @property
    def memory_bytes(self) -> tuple[int, ...]:
        """The largest memory of each rank so far."""
        return tuple(map(peak_bytes_of, self._ranks.process_ids))

    def run(self, inputs: StepInputs, taps: Sequence[str] = ()) -> StepOutputs:
        asked = [*step_arrays(self._which, inputs), text_array("\n".join(taps))]
        logits, *hidden = self._ranks.ask(Down.RUN, asked)
        tensors = [tensor_at(array, None) for array in hidden]
        found = dict(zip(taps, tensors, strict=True))
        return StepOutputs(None if logits is None else tensor_at(logits, None), found)

    def launch(self, inputs: StepInputs, choices: Choices) -> StepTokens:
        sent, self._sent = self._sent, {}  # nothing is, behind a step that fails
        hidden = self._new_states(choices.taps)
        asked = [
            *step_arrays(self._which, inputs),
            *choices_arrays(choices, self._vocab_size, sent),
        ]
        tokens = arrays_tokens(self._ranks.ask(Down.LAUNCH, asked))
        tokens.hidden = hidden
        self._sent = sent_behind(choices, sent)
        return tokens

    def _new_states(self, taps: Sequence[str]) -> dict[str, Any]:
        """Those of the next step, which stay there: see predict.ranks.drafts."""
        self._hidden.clear()  # of earlier steps no rank has any more
        self._hidden = {tap: cast(Any, None) for tap in taps}
        return self._hidden

    def check(self) -> None:
        """Raises EngineError where the ranks have ended by themselves."""
        self._ranks.check()

    def call_on_failure(self, call: Callable[[], None]) -> None:
        """Has `call` called, on another thread, where the ranks end by themselves."""
        self._ranks.call_on_failure(call)

    def copy_blocks(self, copies: BlockCopies) -> None:
        table = np.array(copies, np.int64).reshape(-1, 2)
        self._ranks.send(Down.COPY, [np.array([self._which], np.int64), table])


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with exit code {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by signal {-status} ({signal.Signals(-status).name})"
    return f"was ended by signal {-status}"


def _sums_bytes(size: int) -> int:
    """Bytes of the memory file of sums: see csrc/include/regatta/communicator.h."""
    return LINE * (1 + MOST_RANKS) + 2 * size * SLOT_BYTES


def _environment(size: int) -> dict[str, str]:
    """This process's environment, with a checkout on Python's path, and threads of `size` ranks."""
    threads = max(len(os.sched_getaffinity(0)) // size, 1)
    root, found = Path(__file__).resolve().parents[2], dict(os.environ)
    if (root / "pyproject.toml").is_file():  # site-packages would come ahead of Python's own
        paths = [str(root), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        found.setdefault(name, str(threads))
    return found
