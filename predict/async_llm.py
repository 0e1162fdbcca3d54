"""AsyncLLM: one LLM on a thread of its own, for any number of asyncio tasks.

The thread owns the LLM and runs its engine; tasks leave commands for it in a queue, which it
empties between steps, and it sends each answer's pieces to the event loop that asked for them, once
per step. Nothing else is shared.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar, cast

from predict.config.engine import EngineConfig
from predict.engine.samples import Samples, StreamOutput
from predict.engine.stats import EngineStats
from predict.llm import LLM, Conversation, Prompt, check_streamed
from predict.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from predict.config.keywords import Settings

AnswerEvent = StreamOutput | RequestOutput | BaseException  # the last two are an answer's last ones
Command = Callable[[LLM], None]
T = TypeVar("T")


class AsyncAnswer:
    """The answers to one prompt that was added: iterate over its pieces, or await `output`.

    One of the two, by one task. An answer that fails has finish_reason "error" and says why; both
    raise ValueError where all of the prompt's answers fail, RuntimeError when the engine's thread
    has ended.
    """

    def __init__(self, llm: AsyncLLM, samples: Samples, streamed: bool):
        """streamed: pieces are sent too, not only the finished answer."""
        self._llm = llm
        self._samples = samples
        self._streamed = streamed
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[AnswerEvent] = asyncio.Queue()
        self.request_id = samples.requests[0].request_id

    async def __aiter__(self) -> AsyncIterator[StreamOutput]:
        while not isinstance(event := await self._next(), RequestOutput):
            yield event

    async def output(self) -> RequestOutput:
        """All of it, once it is finished."""
        while not isinstance(event := await self._next(), RequestOutput):
            pass
        return event

    def abort(self) -> None:
        """Ends it, with finish_reason "abort" where it was not finished; returns at once."""
        self._llm.abort(self.request_id)

    async def _next(self) -> StreamOutput | RequestOutput:
        event = await self._events.get()
        if isinstance(event, BaseException):
            raise event
        return event


class AsyncLLM:
    """Answers prompts of many asyncio tasks with one model.

    Close it, or use it with `async with`. Requests run together in one batch, and one's failure,
    abort or cancellation does not touch the others. When the engine itself fails, all unfinished
    requests and all later calls raise RuntimeError with its cause. May be used from several event
    loops.
    """

    def __init__(
        self,
        model: EngineConfig | str | os.PathLike[str],
        make_llm: Callable[[EngineConfig], LLM] = LLM,
        **settings: Unpack[Settings],
    ):
        """Loads the model, and returns when it is ready; in a running event loop use `load`.

        model, settings: see LLM, and raises what it raises. make_llm: makes the LLM, on the
        engine's thread.
        """
        config = EngineConfig.of(model, **settings)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._answers: dict[int, AsyncAnswer] = {}  # unfinished, by request id; the thread's
        self._compiling: dict[int, AsyncAnswer] = {}  # their guides; likewise
        self._closing = False  # written by the thread
        self._ended: BaseException | None = None  # why the thread has ended
        self._lock = threading.Lock()  # no command is queued once `_ended` is set
        self._ready = threading.Event()
        self._llm: LLM | None = None
        self._thread = threading.Thread(
            target=self._run, args=(config, make_llm), name="regatta-engine", daemon=True
        )
        self._thread.start()
        self._ready.wait()
        if self._llm is None:
            assert self._ended is not None
            raise self._ended
        # Before Paddle is taken down, which a running step would not survive.
        atexit.register(self.close)

    @classmethod
    async def load(
        cls, model: EngineConfig | str | os.PathLike[str], **settings: Unpack[Settings]
    ) -> AsyncLLM:
        """An AsyncLLM, without blocking the event loop while it loads. See LLM."""
        return await asyncio.to_thread(lambda: cls(model, **settings))

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.close)

    def add(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncAnswer:
        """Queues a prompt; raises UserError for parameters or a prompt that the model cannot take.

        sampling_params: None: those of LLM.default_params.

        The answer raises errors that only the engine finds, such as a prompt that is too long, and
        the UserError of a guide that cannot be compiled.
        """
        return self._start(prompt, sampling_params, streamed=True)

    def _start(
        self, prompt: Prompt, sampling_params: SamplingParams | None, streamed: bool
    ) -> AsyncAnswer:
        params = self._params(sampling_params)
        samples = self._model().samples(prompt, params, streamed=streamed)
        answer = AsyncAnswer(self, samples, streamed)

        def announce(llm: LLM) -> None:
            self._compiling[answer.request_id] = answer
            if samples.guide is None:
                start(llm)

        def start(llm: LLM) -> None:
            if self._compiling.pop(answer.request_id, None) is None:
                return  # aborted
            try:
                if self._ended is None:
                    samples.check_guide()
                    llm.queue([samples])
            except Exception as error:
                llm.abort([samples])
                self._send({answer: [error]})
            else:
                self._answers[answer.request_id] = answer

        if not self._post(announce):
            self._model()  # raises
        if samples.guide is not None:  # compiled on a thread of its own: no step waits for it
            samples.guide.add_done_callback(lambda _: self._post(start))
        return answer

    def abort(self, request_id: int) -> None:
        """Ends an answer's request; nothing when it is unknown or ended. Returns at once."""

        def end(llm: LLM) -> None:
            answer = self._answers.pop(request_id, None)
            if answer is not None:
                llm.abort([answer._samples])
                self._finish(answer)
            answer = self._compiling.pop(request_id, None)
            if answer is not None:
                answer._samples.abandon()
                self._finish(answer)

        self._post(end)

    async def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> AsyncGenerator[StreamOutput, None]:
        """Yields the answers to a prompt as they grow; leaving early or cancellation aborts them.

        Raises as `add` and AsyncAnswer do. Close the generator (`contextlib.aclosing`) where a
        loop over it may be left early: else it waits for the garbage collector.
        """
        params = self._params(sampling_params)
        check_streamed(params)
        answer = self.add(prompt, params)
        try:
            async for piece in answer:
                yield piece
        finally:
            answer.abort()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """The finished answers to a prompt; cancellation aborts them."""
        answer = self._start(prompt, sampling_params, streamed=False)
        try:
            return await answer.output()
        finally:
            answer.abort()

    async def chat(
        self, messages: Conversation, sampling_params: SamplingParams | None = None
    ) -> RequestOutput:
        """The finished answers to a conversation; see LLM.chat."""
        return await self.generate(self._model().chat_prompt(messages), sampling_params)

    async def stats(self) -> EngineStats:
        """Counts so far, between two steps."""
        return await self._ask(LLM.stats)

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Reads a LoRA adapter, between two steps; see LLM.load_adapter."""
        await self._ask(lambda llm: llm.load_adapter(name, directory))

    async def unload_adapter(self, name: str) -> None:
        """Forgets one, between two steps; see LLM.unload_adapter."""
        await self._ask(lambda llm: llm.unload_adapter(name))

    async def load_prefix(self, name: str, path: str | os.PathLike[str]) -> None:
        """Writes a tuned prefix into the cache, between two steps; see LLM.load_prefix."""
        await self._ask(lambda llm: llm.load_prefix(name, path))

    async def unload_prefix(self, name: str) -> None:
        """Forgets one, between two steps; see LLM.unload_prefix."""
        await self._ask(lambda llm: llm.unload_prefix(name))

    async def _ask(self, ask: Callable[[LLM], T]) -> T:
        """The result of ask(llm), called between two steps; raises what that raises."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def tell(llm: LLM) -> None:
            settle: Callable[[], None]
            try:
                settle = partial(result.set_result, ask(llm))
            except Exception as error:
                settle = partial(result.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(lambda: None if result.done() else settle())

        if not self._post(tell):
            self._model()  # raises
        return await result

    def close(self) -> None:
        """Ends the thread; unfinished answers raise RuntimeError. May be called again."""
        self._post(self._close)
        self._thread.join()
        atexit.unregister(self.close)

    def _close(self, llm: LLM) -> None:
        self._closing = True

    def _model(self) -> LLM:
        """The LLM, for what does not change: vocabulary, tokenizer, templates."""
        if self._ended is not None:
            raise _ended_error(self._ended)
        return cast(LLM, self._llm)

    def _params(self, params: SamplingParams | None) -> SamplingParams:
        return self._recommended if params is None else params

    @cached_property
    def _recommended(self) -> SamplingParams:
        """LLM.default_params, read once: it reads a file."""
        return self._model().default_params()

    def _post(self, command: Command) -> bool:
        """Queues a command for the thread; False when the thread has ended."""
        with self._lock:
            if self._ended is None:
                self._commands.put(command)
            return self._ended is None

    # What follows runs on the engine's thread.

    def _run(self, config: EngineConfig, make_llm: Callable[[EngineConfig], LLM]) -> None:
        reason: BaseException = RuntimeError("it was closed")
        try:
            self._llm = llm = make_llm(config)
            self._ready.set()
            while not self._closing:
                self._run_commands(llm)
                if self._answers and not self._closing:
                    self._step(llm)
        except BaseException as error:
            reason = error
        with self._lock:
            self._ended = reason
        try:
            self._release()
        finally:
            self._ready.set()

    def _run_commands(self, llm: LLM) -> None:
        """Runs the queued commands; waits for one when no answer is unfinished."""
        while True:
            try:
                command = self._commands.get(block=not self._answers and not self._closing)
            except queue.Empty:
                return
            command(llm)
            if self._closing:
                return

    def _step(self, llm: LLM) -> None:
        llm.step(answer._samples for answer in self._answers.values())
        events: dict[AsyncAnswer, list[AnswerEvent]] = {}
        for answer in list(self._answers.values()):
            try:
                new = self._new_events(answer)
            except Exception as error:
                new = [error]
            if new and not isinstance(new[-1], StreamOutput):
                # This was its last event: stop its other requests.
                llm.abort([answer._samples])
                del self._answers[answer.request_id]
            if new:
                events[answer] = new
        for answer in self._send(events):
            self.abort(answer.request_id)

    def _new_events(self, answer: AsyncAnswer) -> list[AnswerEvent]:
        """An answer's events after a step; an error or an output is its last event."""
        samples = answer._samples
        new: list[AnswerEvent] = [*samples.pieces()] if answer._streamed else []
        if samples.is_finished:
            output = samples.output()
            new.append(output if samples.error is None else ValueError(samples.error))
        return new

    def _finish(self, answer: AsyncAnswer) -> None:
        """Sends the last events of an aborted answer."""
        try:
            pieces = answer._samples.pieces() if answer._streamed else []
            left: list[AnswerEvent] = [*pieces, answer._samples.output()]
        except Exception as error:
            left = [error]
        self._send({answer: left})

    def _send(self, events: dict[AsyncAnswer, list[AnswerEvent]]) -> list[AsyncAnswer]:
        """Sends events to their event loops, one call each; returns answers of closed loops."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[AsyncAnswer]] = defaultdict(list)
        for answer in events:
            by_loop[answer._loop].append(answer)
        lost: list[AsyncAnswer] = []

        def deliver(answers: Sequence[AsyncAnswer]) -> None:
            for answer in answers:
                for event in events[answer]:
                    answer._events.put_nowait(event)

        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(deliver, answers)
            except RuntimeError:  # the loop is closed
                lost += answers
        return lost

    def _release(self) -> None:
        """Sends unfinished answers the reason why the thread ends, and frees their blocks."""
        assert self._ended is not None
        if self._llm is None:
            return  # no answer was added
        while not self._commands.empty():  # `_post` takes no more commands
            self._commands.get()(self._llm)
        answers = [*self._answers.values(), *self._compiling.values()]
        self._send({answer: [_ended_error(self._ended)] for answer in answers})
        self._llm.abort([answer._samples for answer in answers])


def _ended_error(cause: BaseException) -> RuntimeError:
    kind = "" if type(cause) is RuntimeError else f"{type(cause).__name__}: "
    error = RuntimeError(f"the engine's thread has ended: {kind}{cause}")
    error.__cause__ = cause
    return error
