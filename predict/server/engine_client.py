"""The front's side of the engine: prompts go in, pieces of answers come out."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import numpy as np
import numpy.typing as npt

from predict.config.adapters import Change
from predict.config.engine import EngineConfig
from predict.config.rest import Rest
from predict.engine.embedding import Text
from predict.engine.samples import StreamOutput
from predict.engine.stats import EngineStats
from predict.errors import EXIT_FAILURE, EXIT_USAGE, EngineError, UserError
from predict.images.placed import Pictures
from predict.request import RequestOutput, SamplingParams
from predict.server.config import API_KEY_VARIABLE
from predict.server.pictures import sent_pictures
from predict.server.wire import (
    Abort,
    Add,
    AnswerMetrics,
    AskChange,
    AskRest,
    AskStats,
    AskVectors,
    Changed,
    DropVectors,
    Ended,
    Failed,
    FromEngine,
    FromFront,
    Go,
    Messages,
    ModelInfo,
    Needs,
    Ready,
    Start,
    StepNews,
    Stop,
    Told,
    Vectors,
    frame,
)

LOG_FORMAT_VARIABLE = "REGATTA_ENGINE_LOG_FORMAT"  # of the engine's process
END_SECONDS = 10.0  # that a process may take to end after its last word


class EngineDied(RuntimeError):  # noqa: N818  # a state, as the wait for it is named
    """The engine's process has ended: no request can be answered any more."""


class ChangeFailed(RuntimeError):  # noqa: N818  # likewise
    """A change of adapters, prefixes or weights failed by a fault."""


class Answer(Protocol):
    """The answers to one prompt.

    Iterating gives the pieces that have come since the last time, and waits where there are none.
    Whoever stops early calls `abort`. The iteration raises UserError, before any piece, where the
    engine refuses the request (some limits only the engine knows), and EngineDied. A later failure
    is a piece with finish_reason "error" and `error`; the other answers to the prompt go on.
    """

    request_id: int
    # Known when the iteration has ended; None where it was refused.
    metrics: AnswerMetrics | None
    # Everything, of an answer that is not streamed, when the iteration has ended.
    output: RequestOutput | None

    def __aiter__(self) -> AsyncIterator[list[StreamOutput]]: ...

    def abort(self) -> None:
        """Ends the answer if it has not ended; returns at once.

        The iteration ends behind pieces with finish_reason "abort", which the engine sends.
        """


class EngineHandle(Protocol):
    """The server's view of an engine, in another process or machine."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Raises RuntimeError before it is loaded."""

    @property
    def is_ready(self) -> bool:
        """Whether the model is loaded, and the engine alive."""

    @property
    def is_alive(self) -> bool:
        """Whether the process runs, loading or loaded."""

    @property
    def failure(self) -> str | None:
        """Why the engine has ended, in one sentence; None while it is alive."""

    @property
    def num_in_flight(self) -> int:
        """Answers (n of each prompt) that were added and have not ended: ServerConfig.max_queue."""

    async def ready(self) -> None:
        """Returns once the model is loaded; raises EngineDied, or UserError where it cannot be."""

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        streamed: bool,
        pictures: Pictures | None = None,
    ) -> Answer:
        """Sends a prompt to the engine. Raises EngineDied.

        pictures: whose tokens it has.

        streamed: pieces come as they are made. Else they come at the end, one for each answer, and
        `output` is set, with logprobs of the prompt, scores, and the choices of best_of and beams.
        """

    async def stats(self) -> EngineStats:
        """Counts, between two steps. Raises EngineDied."""

    async def change(self, change: Change) -> None:
        """Loads or unloads an adapter or a tuned prefix.

        Requests may name what is loaded once this returns. They may not name what is unloaded from
        now on; earlier ones are finished, and a prefix's blocks free behind the last of them.
        Raises UserError for what does not fit, ChangeFailed, EngineDied.
        """

    @property
    def is_sleeping(self) -> bool:
        """Whether the model sleeps, or is about to: then nothing can be added."""

    async def rest(self, rest: Rest) -> None:
        """Sleep, wake-up or other weights, once what was added before has ended.

        Raises UserError for what cannot be, ChangeFailed, EngineDied.
        """

    async def vectors(
        self, texts: Sequence[Text], scores: bool, adapter: str | None
    ) -> npt.NDArray[np.float32]:
        """Vectors [texts, size], or results of score_pooler; a cancelled task drops them.

        Raises UserError where the engine refuses the texts, EngineError, EngineDied.
        """


class EngineProcess:
    """The engine's process, and the front's end of the socket to it."""

    def __init__(
        self,
        arguments: Sequence[str] = ("-m", "predict.server.engine_process"),
        log_format: str = "text",
    ):
        """Starts the process. arguments: of Python; tests and benchmarks give other ones."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *arguments, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**_environment(), LOG_FORMAT_VARIABLE: log_format},
                # Ctrl-C in a terminal is the front's alone, which finishes what runs.
                start_new_session=True,
            )
        self.socket = ours

    @property
    def process_id(self) -> int:
        """The process's id."""
        return self._process.pid

    def send_config(self, config: EngineConfig, asks: bool = False) -> None:
        """Makes the process load a model; Ready or Failed answers.

        asks: Needs does first, and it loads behind EngineClient.go.
        """
        with contextlib.suppress(OSError):  # the process has ended: reading reports that
            self.socket.sendall(frame(Start(config.settings, asks)))

    def ended(self) -> str:
        """Waits up to END_SECONDS for the process's end; how it ended, as a predicate."""
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            return "is ending"
        if status < 0:
            return f"was ended by signal {-status} ({_signal_name(-status)})"
        return f"ended with exit code {status}"

    def kill(self) -> None:
        """Ends it at once, and waits until it has ended."""
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    """This process's environment, without the API key, with the checkout on Python's path."""
    found = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        paths = [str(root), found.get("PYTHONPATH", "")]
        found["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return found


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "real-time"


class ClientAnswer:
    """An Answer of EngineClient. One task iterates over it."""

    __slots__ = (
        "_client",
        "_error",
        "_has_ended",
        "_pieces",
        "_waiter",
        "metrics",
        "num_answers",
        "output",
        "request_id",
    )

    def __init__(self, client: EngineClient, request_id: int, num_answers: int):
        self._client = client
        self.request_id = request_id
        self.num_answers = num_answers
        self.metrics: AnswerMetrics | None = None
        self.output: RequestOutput | None = None
        self._pieces: list[StreamOutput] = []
        self._has_ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[list[StreamOutput]]:
        return self

    async def __anext__(self) -> list[StreamOutput]:
        """The pieces that have come since the last time."""
        while not self._pieces:
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._waiter = self._client.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._pieces = self._pieces, []
        return pieces

    def abort(self) -> None:
        if not self._has_ended:
            self._client.abort(self.request_id)

    # Called by EngineClient alone.

    def take(self, pieces: list[StreamOutput]) -> None:
        """Adds pieces."""
        if self._pieces:
            self._pieces += pieces
        else:
            self._pieces = pieces
        self._wake()

    def end(self, ended: Ended) -> None:
        """Ends the answer with the engine's message."""
        self.metrics, self.output = ended.metrics, ended.output
        if ended.refused is not None:
            self._error = UserError(ended.refused)
        if ended.output is not None:
            self._pieces += [
                StreamOutput(
                    *(each.text, each.token_ids, each.finish_reason, each.index, 0, each.error),
                    each.logprobs,
                )
                for each in ended.output.outputs
            ]
        self._has_ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the answer: the iteration raises `error` behind the pieces that have come."""
        self._has_ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class EngineClient(asyncio.Protocol):
    """The Engine in a process of its own. One event loop's, the one that `connect` runs in."""

    def __init__(
        self, process: EngineProcess, on_ended: Callable[[AnswerMetrics], None] = lambda _: None
    ):
        """on_ended: called with the metrics of each answer that has ended."""
        self._process = process
        self._on_ended = on_ended
        self._messages: Messages[FromEngine] = Messages(FromEngine)
        self._transport: asyncio.Transport | None = None
        self._answers: dict[int, ClientAnswer] = {}  # unfinished
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._num_asked = 0  # answers and questions, for their ids
        self.num_in_flight = 0
        self.is_sleeping = False
        self._info: ModelInfo | None = None
        self._failed: Failed | None = None  # the engine's last message
        self.failure: str | None = None

    async def connect(self) -> None:
        """Begins to read the engine's messages."""
        self.loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self.loop.create_future()
        self._needs: asyncio.Future[int] = self.loop.create_future()
        self._lost: asyncio.Future[None] = self.loop.create_future()
        await self.loop.create_connection(lambda: self, sock=self._process.socket)

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise RuntimeError("the model is not loaded yet")
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._info is not None and self.failure is None

    @property
    def is_alive(self) -> bool:
        return self.failure is None

    @property
    def exit_code(self) -> int:
        """The exit status of this process once the engine has ended."""
        return EXIT_FAILURE if self._failed is None else self._failed.exit_code

    async def ready(self) -> None:
        await asyncio.shield(self._loaded)

    async def needs(self) -> int:
        """Bytes of a model whose process asks first. Raises EngineDied, UserError."""
        waits: list[asyncio.Future[Any]] = [self._needs, self._loaded]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not self._needs.done():
            await self.ready()  # raises
        return self._needs.result()

    def go(self) -> None:
        """Lets such a process load. Raises EngineDied."""
        self._send(Go())

    async def died(self) -> None:
        """Returns when the engine has ended, or cannot be reached."""
        await asyncio.shield(self._lost)

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        streamed: bool,
        pictures: Pictures | None = None,
    ) -> ClientAnswer:
        self._num_asked += 1
        answer = ClientAnswer(self, self._num_asked, params.num_samples)
        self._send(
            Add(
                *(answer.request_id, list(prompt_token_ids), params, streamed),
                *(time.perf_counter(), sent_pictures(pictures)),
            )
        )
        self._answers[answer.request_id] = answer
        self.num_in_flight += answer.num_answers
        return answer

    def abort(self, request_id: int) -> None:
        """Sends the engine an abort, unless the answer has ended."""
        if request_id in self._answers and self.failure is None:
            self._send(Abort(request_id))

    async def stats(self) -> EngineStats:
        told: Told = await self._ask(AskStats)
        return told.stats

    async def change(self, change: Change) -> None:
        changed: Changed = await self._ask(lambda question: AskChange(question, change))
        if changed.refused is not None:
            raise UserError(changed.refused)
        if changed.failed is not None:
            raise ChangeFailed(changed.failed)

    async def rest(self, rest: Rest) -> None:
        was, self.is_sleeping = self.is_sleeping, self.is_sleeping or rest.act == "sleep"
        try:
            changed: Changed = await self._ask(lambda question: AskRest(question, rest))
        except asyncio.CancelledError:  # it goes on, and whoever asks next hears how it ended
            self.is_sleeping = was
            raise
        self.is_sleeping = changed.is_sleeping
        if changed.refused is not None:
            raise UserError(changed.refused)
        if changed.failed is not None:
            raise ChangeFailed(changed.failed)

    async def vectors(
        self, texts: Sequence[Text], scores: bool, adapter: str | None
    ) -> npt.NDArray[np.float32]:
        number, given = 0, list(texts)

        def question(asked: int) -> FromFront:
            nonlocal number
            number = asked
            return AskVectors(asked, given, scores, adapter)

        self.num_in_flight += len(given)
        try:
            made: Vectors = await self._ask(question)
        except asyncio.CancelledError:
            if self.failure is None:
                self._send(DropVectors(number))
            raise
        finally:
            self.num_in_flight -= len(given)
        if made.refused is not None:
            raise UserError(made.refused)
        if made.failed is not None:
            raise EngineError(made.failed)
        return np.frombuffer(made.rows, np.float32).reshape(-1, made.size)

    async def _ask(self, question: Callable[[int], FromFront]) -> Any:
        """Sends question(number); the message that answers it. Raises EngineDied."""
        self._num_asked += 1
        number = self._num_asked
        future: asyncio.Future[Any] = self.loop.create_future()
        self._send(question(number))
        self._questions[number] = future
        try:
            return await future
        finally:
            self._questions.pop(number, None)

    async def stop(self) -> None:
        """Ends the engine's process and waits for its end; running requests are cut off."""
        if self.is_ready:  # else it is loading, and reads no messages
            self._send(Stop())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.died(), END_SECONDS)
        self._process.kill()  # does nothing to a process that has ended

    def _send(self, message: FromFront) -> None:
        if self.failure is not None:
            raise EngineDied(self.failure)
        assert self._transport is not None
        self._transport.write(frame(message))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Takes the socket's transport."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Dispatches the engine's messages."""
        try:
            for message in self._messages.take(data):
                self._take(message)
        except msgspec.DecodeError as error:
            self._die(f"the engine's process says what is no message: {error}")
            self._process.kill()

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine's process has ended, or is about to."""
        if self._failed is not None:
            self._die(self._failed.message)
        else:
            self._die("the engine's process has ended")

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, StepNews):
            answers = self._answers
            for request_id, pieces in message.pieces:
                answer = answers.get(request_id)
                if answer is not None:
                    answer.take(pieces)
            for ended in message.ended:
                self._end(ended)
        elif isinstance(message, (Told, Changed, Vectors)):
            question = self._questions.pop(message.question, None)
            if question is not None and not question.done():
                question.set_result(message)
        elif isinstance(message, Needs):
            self._needs.set_result(message.num_bytes)
        elif isinstance(message, Ready):
            self._info = message.info
            self._loaded.set_result(None)
        else:
            self._failed = message

    def _end(self, ended: Ended) -> None:
        answer = self._answers.pop(ended.request_id, None)
        if answer is None:
            return
        self.num_in_flight -= answer.num_answers
        answer.end(ended)
        if ended.metrics is not None:
            self._on_ended(ended.metrics)

    def _die(self, failure: str) -> None:
        """Fails all waiting answers and questions."""
        if self.failure is not None:
            return
        self.failure = failure
        for answer in self._answers.values():
            answer.fail(EngineDied(failure))
        self._answers.clear()
        self.num_in_flight = 0
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineDied(failure))
        if not self._loaded.done():
            error: Exception = EngineDied(failure)
            if self._failed is not None and self._failed.exit_code == EXIT_USAGE:
                error = UserError(failure)
            self._loaded.set_exception(error)
            self._loaded.exception()  # marks it as retrieved: there may be no waiter
        if not self._lost.done():
            self._lost.set_result(None)

    async def last_words(self) -> str:
        """Why the engine has ended, for the terminal: once the process has ended."""
        how = await self.loop.run_in_executor(None, self._process.ended)
        if self._failed is not None:
            return self._failed.message
        return f"the engine's process {how}"
