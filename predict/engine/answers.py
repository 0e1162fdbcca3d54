"""The answer loop: prompts are added and aborted, steps run, and each answer's news are told.

LLM.step runs a step between `prepare` and `settle`. LLM.generate, LLM.stream, AsyncLLM and the
server's engine process are shells of it: they hand on what it tells, to a caller, to tasks, or over
a socket.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from predict.engine.engine import Engine
from predict.engine.failures import explained
from predict.engine.request_state import Request
from predict.engine.samples import Samples, StreamOutput
from predict.engine.scheduled import ScheduledBatch
from predict.errors import EngineError, UserError
from predict.request import RequestOutput


class News(NamedTuple):
    """What there is new of the answers to one prompt."""

    samples: Samples
    pieces: list[StreamOutput]  # of streamed ones, since the last news
    output: RequestOutput | None = None  # all of it, at its end
    # The end, too: why it never ran (a wrong guide, a refusal), or why its text cannot be made.
    error: Exception | None = None
    is_last: bool = False


Tell = Callable[[News], None]


class AnswerLoop:
    """The answers of one engine that have not ended. Not thread-safe.

    An answer whose guide is still being compiled, on another thread, is queued by the first step
    after that; `wake`, called on that thread, says when. It waits for nothing else, and no other
    answer waits for it.
    """

    def __init__(self, engine: Engine, make_current: Callable[[], None]):
        """make_current: makes the engine's device the current one of the thread that calls it."""
        self._engine = engine
        self._make_current = make_current
        self._thread = threading.get_ident()  # where that was called last
        self._live: dict[Samples, Tell] = {}
        self._compiling: dict[Samples, Tell] = {}
        self._by_request: dict[int, Samples] = {}  # the live ones
        self._num_streamed = 0  # of the live ones
        self._held: list[tuple[Sequence[Samples], Tell]] | None = None  # see `hold`
        self.wake: Callable[[], None] = lambda: None
        self.refusal: str | None = None  # why nothing can be added now

    @property
    def is_busy(self) -> bool:
        """Whether a step has an answer to go on with."""
        return bool(self._live) or any(_is_compiled(each) for each in self._compiling)

    @property
    def is_idle(self) -> bool:
        """Whether no answer has begun that has not ended; those that are held have not begun."""
        return not (self._live or self._compiling)

    def hold(self) -> None:
        """Keeps what is added from now on aside, until `release`."""
        if self._held is None:
            self._held = []

    def release(self) -> None:
        """Queues what was held; a refusal is told as the news of an answer."""
        held, self._held = self._held or [], None
        for groups, tell in held:
            try:
                self.add(groups, tell)
            except ValueError as error:
                for samples in groups:
                    tell(News(samples, [], None, error, True))

    def abort_all(self) -> None:
        """Ends all answers that have begun, and tells their last news."""
        for samples, tell in [*self._live.items(), *self._compiling.items()]:
            if news := self.abort(samples):
                tell(news)

    def add(self, groups: Sequence[Samples], tell: Tell) -> None:
        """Queues the requests of prompts. Raises ValueError with none of them queued.

        tell(news) is called whenever there are some, and here for what has ended already.
        """
        if self.refusal is not None:
            raise UserError(self.refusal)
        if self._held is not None:
            self._held.append((groups, tell))
            return
        ready: list[Samples] = []
        for samples in groups:
            if _is_compiled(samples):
                ready.append(samples)
            else:
                self._compiling[samples] = tell
        try:
            self._begin(ready, tell)
        except ValueError:
            for samples in groups:
                self._compiling.pop(samples, None)
            raise
        for samples in groups:
            if samples.guide is not None and samples in self._compiling:
                samples.guide.add_done_callback(lambda _: self.wake())

    def abort(self, samples: Samples) -> News | None:
        """Ends answers; their last news, which are not told. None where they have ended."""
        held = next((each for each in self._held or () if samples in each[0]), None)
        if held is not None and self._held is not None:
            self._held.remove(held)
            if others := [each for each in held[0] if each is not samples]:
                self._held.append((others, held[1]))
        if held is not None or self._compiling.pop(samples, None) is not None:
            for request in samples.requests:  # which were never added
                request.finish_reason = "abort"
        elif samples in self._live:
            for request in samples.requests:
                self._engine.abort(request.request_id)
        else:
            return None
        return self._news(samples)

    def prepare(self) -> None:
        """To be called ahead of each step of the engine: queues answers with compiled guides."""
        if self._compiling:
            self._begin_compiled()
        thread = threading.get_ident()
        if thread != self._thread:
            self._make_current()
            self._thread = thread

    def settle(self, batch: ScheduledBatch | None, finished: Sequence[Request]) -> None:
        """To be called behind it, with what it returned: tells the news.

        Raises EngineError where nothing could run and an answer has not ended.
        """
        if batch is None and not finished:
            if self._live:
                raise EngineError(f"nothing runs, and {len(self._live)} answers have not ended")
            return
        found: dict[Samples, None] = {}
        if batch is not None and self._num_streamed:
            for span in batch.spans:
                # None: aborted meanwhile, or a beam, whose search is told of at its end.
                samples = self._by_request.get(span.request.request_id)
                if samples is not None and span.samples and samples.streamed:
                    found[samples] = None
        for request in finished:
            samples = self._by_request.get(request.request_id)
            if samples is not None and (samples.streamed or samples.is_finished):
                found[samples] = None
        for samples in found:
            tell, news = self._live[samples], self._news(samples)
            if news.pieces or news.is_last:
                tell(news)

    def _begin(self, groups: Sequence[Samples], tell: Tell) -> None:
        """Queues answers whose guides are there. Raises ValueError with none of them queued."""
        try:
            for samples in groups:
                if samples.settle_guide():
                    for request in samples.requests:
                        self._engine.add(request)
        except ValueError:
            for samples in groups:
                for request in samples.requests:
                    self._engine.abort(request.request_id)
            raise
        now = time.perf_counter()
        for samples in groups:
            samples.begun_time = now
            self._live[samples] = tell
            self._num_streamed += samples.streamed
            self._by_request.update((each.request_id, samples) for each in samples.requests)
        for samples in groups:
            if samples.is_finished:
                tell(self._news(samples))

    def _begin_compiled(self) -> None:
        for samples, tell in list(self._compiling.items()):
            if _is_compiled(samples):
                del self._compiling[samples]
                try:
                    self._begin([samples], tell)
                except ValueError as error:
                    tell(News(samples, [], None, error, True))

    def _news(self, samples: Samples) -> News:
        """What is new of these answers, which leave the loop where they have ended."""
        started = time.perf_counter()
        try:
            pieces = samples.pieces() if samples.streamed else []
            if not samples.is_finished:
                samples.text_seconds += time.perf_counter() - started
                return News(samples, pieces)
            error = None
            if samples.guide is not None and samples.error is not None:
                error = cast("Exception | None", samples.guide.exception())
            news = News(samples, pieces, samples.output(), error, True)
        except Exception as error:  # making its text failed: this answer alone ends
            for request in samples.requests:
                self._engine.fail(request, explained(request, error))
            piece = StreamOutput("", (), "error", error=explained(samples.requests[0], error))
            news = News(samples, [piece], None, error, True)
        samples.text_seconds += time.perf_counter() - started
        if self._live.pop(samples, None) is not None:
            self._num_streamed -= samples.streamed
            for request in samples.requests:
                self._by_request.pop(request.request_id, None)
        return news


def _is_compiled(samples: Samples) -> bool:
    return samples.guide is None or samples.guide.done()
