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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from predict.config.adapters import AddonVerbs, Change
from predict.config.engine import EngineConfig
from predict.config.rest import Rest, RestVerbs
from predict.engine.answers import News
from predict.engine.embedding import VectorJob
from predict.engine.retrieval import Ranked
from predict.engine.samples import Samples, StreamOutput
from predict.engine.stats import EngineStats
from predict.llm import LLM, Conversation, check_streamed
from predict.nn.pooling import Vectors
from predict.request import RequestOutput, SamplingParams
from predict.rests import Rests
from predict.vectors import Asked, Prompt, SeenPrompt

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


class AsyncLLM(AddonVerbs[Coroutine[Any, Any, None]], RestVerbs[Coroutine[Any, Any, None]]):
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
        self._events: dict[AsyncAnswer, list[AnswerEvent]] = {}  # not sent yet; likewise
        self._jobs: dict[asyncio.Future[Vectors], VectorJob] = {}  # unfinished; likewise
        # Texts that wait for a rest; likewise.
        self._later: dict[asyncio.Future[Vectors], Command] = {}
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

    def add(self, prompt: SeenPrompt, sampling_params: SamplingParams | None = None) -> AsyncAnswer:
        """Queues a prompt; raises UserError for parameters or a prompt that the model cannot take.

        sampling_params: None: those of LLM.default_params.

        The answer raises errors that only the engine finds, such as a prompt that is too long, and
        the UserError of a guide that cannot be compiled.
        """
        return self._start(prompt, sampling_params, streamed=True)

    def _start(
        self, prompt: SeenPrompt, sampling_params: SamplingParams | None, streamed: bool
    ) -> AsyncAnswer:
        params = self._params(sampling_params)
        samples = self._model().samples(prompt, params, streamed=streamed)
        answer = AsyncAnswer(self, samples, streamed)

        def start(llm: LLM) -> None:
            self._answers[answer.request_id] = answer
            try:
                llm.answers.add([samples], partial(self._take, answer))
            except Exception as error:
                self._take(answer, News(samples, [], None, error, True))

        if not self._post(start):
            self._model()  # raises
        return answer

    def abort(self, request_id: int) -> None:
        """Ends an answer's request; nothing when it is unknown or ended. Returns at once."""

        def end(llm: LLM) -> None:
            answer = self._answers.get(request_id)
            news = None if answer is None else llm.answers.abort(answer._samples)
            if answer is not None and news is not None:
                self._take(answer, news)

        self._post(end)

    async def stream(
        self, prompt: SeenPrompt, sampling_params: SamplingParams | None = None
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
        self, prompt: SeenPrompt, sampling_params: SamplingParams | None = None
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

    async def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str | None = None,
        normalize: bool | None = None,
        **options: Any,
    ) -> Vectors:
        """Vectors [prompts, size], made between steps of answers; see LLM.embed.

        Cancellation drops the texts, here and in `score` and `rerank`.
        """
        return await self._made(self._model().asked_vectors(prompts, pooling, normalize, **options))

    async def score(
        self, queries: str | Sequence[str], documents: str | Sequence[str], **options: Any
    ) -> Vectors:
        """Scores [pairs]; see LLM.score."""
        return await self._made(self._model().asked_scores(queries, documents, **options))

    async def rerank(
        self, query: str, documents: Sequence[str], top_n: int | None = None, **options: Any
    ) -> list[Ranked]:
        """The documents' places and scores, the best first; see LLM.rerank."""
        return await self._made(self._model().asked_order(query, documents, top_n, **options))

    async def _made(self, asked: Asked[T]) -> T:
        made: asyncio.Future[Vectors] = asyncio.get_running_loop().create_future()

        def start(llm: LLM) -> None:
            if self._rests.is_waiting:
                self._later[made] = start
                return
            try:
                self._jobs[made] = llm.add_texts(asked.texts, asked.pooler, asked.adapter)
            except Exception as error:
                _settle(made, partial(made.set_exception, error))

        def drop(llm: LLM) -> None:
            self._later.pop(made, None)
            if made in self._jobs:
                llm.embedder.abort(self._jobs.pop(made))

        if not self._post(start):
            self._model()  # raises
        try:
            return asked.finish(await made)
        finally:
            self._post(drop)

    async def stats(self) -> EngineStats:
        """Counts so far, between two steps."""
        return await self._ask(LLM.stats)

    async def change(self, change: Change) -> None:
        """Loads or unloads an adapter or a prefix, between two steps; see AddonVerbs."""
        await self._ask(lambda llm: llm.change(change))

    @property
    def is_sleeping(self) -> bool:
        """See LLM.is_sleeping."""
        return self._model().is_sleeping

    async def rest(self, rest: Rest) -> None:
        """Does what `rest` says, once nothing runs; what is asked meanwhile waits."""
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: Exception | None) -> None:
            if error is None:
                _settle(result, partial(result.set_result, None))
            else:
                _settle(result, partial(result.set_exception, error))

        if not self._post(lambda _: self._rests.ask(rest, done)):
            self._model()  # raises
        await result

    async def _ask(self, ask: Callable[[LLM], T]) -> T:
        """The result of ask(llm), called between two steps; raises what that raises."""
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def tell(llm: LLM) -> None:
            settle: Callable[[], None]
            try:
                settle = partial(result.set_result, ask(llm))
            except Exception as error:
                settle = partial(result.set_exception, error)
            _settle(result, settle)

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
            self._rests = Rests(llm)
            llm.answers.wake = self._wake
            self._ready.set()
            while not self._closing:
                self._run_commands(llm)
                self._rests.settle()
                if self._later and not self._rests.is_waiting:
                    later, self._later = self._later, {}
                    for command in later.values():
                        command(llm)
                llm.check()
                if llm.answers.is_busy and not self._closing:
                    llm.step()
                if llm.embedder.is_busy and not self._closing:
                    llm.embedder.step()
                    self._send_vectors()
                self._send()
        except BaseException as error:
            reason = error
        with self._lock:
            self._ended = reason
        try:
            self._release()
        finally:
            self._ready.set()

    def _run_commands(self, llm: LLM) -> None:
        """Runs the queued commands; waits for one when there is nothing else to do."""
        while not self._closing:
            is_idle = not (self._events or llm.answers.is_busy or llm.embedder.is_busy)
            is_idle = is_idle and not (self._rests.is_waiting or self._later)
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return
            command(llm)

    def _wake(self) -> None:
        """Lets the thread look for guides that are compiled. Called on any thread."""
        self._post(lambda _: None)

    def _take(self, answer: AsyncAnswer, news: News) -> None:
        """Notes an answer's events; an error or an output is the last one."""
        events = self._events.setdefault(answer, [])
        if news.error is None:
            events += news.pieces
        if news.is_last:
            self._answers.pop(answer.request_id, None)
            error = news.error
            if error is None and news.samples.error is not None:
                error = ValueError(news.samples.error)
            events.append(error or cast(RequestOutput, news.output))

    def _send(self) -> None:
        """Sends what is noted to its event loops, one call each; aborts answers of closed ones."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[AsyncAnswer]] = defaultdict(list)
        events, self._events = self._events, {}
        for answer in events:
            by_loop[answer._loop].append(answer)

        def deliver(answers: Sequence[AsyncAnswer]) -> None:
            for answer in answers:
                for event in events[answer]:
                    answer._events.put_nowait(event)

        for loop, answers in by_loop.items():
            try:
                loop.call_soon_threadsafe(deliver, answers)
            except RuntimeError:  # the loop is closed
                for answer in answers:
                    self.abort(answer.request_id)

    def _send_vectors(self) -> None:
        for made, job in [*self._jobs.items()]:
            if job.is_finished:
                del self._jobs[made]
                if job.vectors is not None:
                    _settle(made, partial(made.set_result, job.vectors))
                else:
                    _settle(made, partial(made.set_exception, job.error or AssertionError()))

    def _release(self) -> None:
        """Sends unfinished answers the reason why the thread ends, and frees their blocks."""
        if self._llm is None or self._ended is None:
            return  # no answer was added
        while not self._commands.empty():  # `_post` takes no more commands
            self._commands.get()(self._llm)
        for made, job in self._jobs.items():
            self._llm.embedder.abort(job)
            _settle(made, partial(made.set_exception, _ended_error(self._ended)))
        for made in self._later:
            _settle(made, partial(made.set_exception, _ended_error(self._ended)))
        self._rests.fail(_ended_error(self._ended))
        for answer in self._answers.values():
            self._llm.answers.abort(answer._samples)
            self._events.setdefault(answer, []).append(_ended_error(self._ended))
        self._send()


def _settle(future: asyncio.Future[Any], settle: Callable[[], None]) -> None:
    """Calls `settle` on the future's loop, unless it is done. May be called by any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        future.get_loop().call_soon_threadsafe(lambda: None if future.done() else settle())


def _ended_error(cause: BaseException) -> RuntimeError:
    kind = "" if type(cause) is RuntimeError else f"{type(cause).__name__}: "
    error = RuntimeError(f"the engine's thread has ended: {kind}{cause}")
    error.__cause__ = cause
    return error
