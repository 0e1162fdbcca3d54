"""A request's prompts at the engine: their pieces, their ends, and their abort."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from predict.engine.samples import StreamOutput
from predict.errors import UserError
from predict.images.placed import Pictures
from predict.request import RequestOutput, SamplingParams
from predict.server.access_log import MAX_TEXT, shortened
from predict.server.asked import ranked
from predict.server.context import RECORD, Context, record_of
from predict.server.engine_client import Answer, EngineDied
from predict.server.errors import ApiError
from predict.server.wire import AnswerMetrics

BODY = "http.response.body"  # ASGI's type of a message with a part of the body
Refused = Callable[[UserError], ApiError]
Pieces = tuple[int, list[StreamOutput]]  # index of the prompt in the request, its new pieces


@dataclass
class Usage:
    """Tokens of a request, all prompts and answers together."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_thought_tokens: int = 0  # of the output, where a form of answer tells them
    num_draft_tokens: int = 0  # that were verified
    num_accepted_draft_tokens: int = 0

    def add(self, metrics: AnswerMetrics | None) -> None:
        """Counts the metrics of the answers to one prompt."""
        if metrics is not None:
            self.num_cached_tokens += metrics.num_cached_tokens
            self.num_draft_tokens += metrics.num_draft_tokens
            self.num_accepted_draft_tokens += metrics.num_accepted_draft_tokens


@dataclass
class Job:
    """The prompts of a request, and the parameters of all of them."""

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    refused: Refused  # turns the engine's refusal into the request's error
    usage: Usage = field(default_factory=Usage)
    pictures: Pictures | None = None  # of the one prompt


class Run:
    """A job at the engine, for the length of an `async with` block.

    Unfinished answers are aborted at its end and when the client disconnects. Raises ApiError when
    the queue is full (429), at the deadline (504), and when the engine has ended (503).
    """

    def __init__(self, context: Context, request: Request, job: Job, *, streamed: bool) -> None:
        self._context = context
        self._request = request
        self._job = job
        self._streamed = streamed
        self._record = record_of(request)
        self._num_answers = 0  # that the admission has counted in
        self._answers: list[Answer] = []
        self._sent_at: list[float] = []  # when each was sent, perf_counter seconds
        self._watcher: asyncio.Task[None] | None = None
        self.client_is_gone = False
        self.is_logged = context.config.log_requests

    async def __aenter__(self) -> Run:
        job = self._job
        count = len(job.prompts) * job.params.num_samples
        params = ranked(job.params, self._record.priority, self._record.key)
        self._context.admission.enter(count, self._record.key)
        self._num_answers = count
        try:
            if self._record.body is not None:
                self._record.body.release()
            for prompt in job.prompts:
                self._sent_at.append(time.perf_counter())
                self._answers.append(
                    self._context.engine.add(
                        prompt, params, streamed=self._streamed, pictures=job.pictures
                    )
                )
        except BaseException as error:  # no `__aexit__` follows
            self._leave()
            if isinstance(error, EngineDied):
                raise self._context.unavailable() from None
            raise
        job.usage.num_prompt_tokens = sum(map(len, job.prompts))
        self._record.log["prompt_tokens"] = job.usage.num_prompt_tokens
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
        self._leave()
        self._record.log["output_tokens"] = self._job.usage.num_output_tokens
        self._tell()
        if self.client_is_gone:
            self._record.log["aborted"] = True

    def _tell(self) -> None:
        """Tells metrics and the trace what each answer took, by model and adapter."""
        model, trace = self._context.config.model_names[0], self._record.trace
        adapter = self._job.params.adapter or ""
        for sent_at, answer in zip(self._sent_at, self._answers, strict=True):
            if answer.metrics is not None:
                self._context.metrics.answer_of(model, adapter, answer.metrics)
                if trace is not None:
                    trace.answer(sent_at, answer.metrics, model, adapter)

    async def outputs(self) -> list[RequestOutput]:
        """The outputs of all prompts, once all have ended."""
        found: list[RequestOutput] = []
        with self.time():
            for answer in self._answers:
                async for _ in self._of(answer):
                    pass
                self._job.usage.add(answer.metrics)
                if answer.output is None:
                    raise ApiError(
                        503,
                        "the answer was broken off; try again",
                        headers={"Retry-After": self._context.retry_after},
                    )
                found.append(answer.output)
        answers = [each for output in found for each in output.outputs]
        if all(each.finish_reason == "error" for each in answers):
            raise self.failed(answers[0].error or "")
        self._job.usage.num_output_tokens += sum(len(each.token_ids) for each in answers)
        return found

    async def pieces(self) -> AsyncGenerator[Pieces, None]:
        """The new pieces of all prompts, as they come."""
        if len(self._answers) == 1:
            answer = self._answers[0]
            async for batch in self._of(answer):
                yield 0, batch
            self._job.usage.add(answer.metrics)
            return
        async with _merged([self._of(answer) for answer in self._answers]) as merged:
            async for each in merged:
                yield each
        for answer in self._answers:
            self._job.usage.add(answer.metrics)

    @contextlib.contextmanager
    def time(self) -> Iterator[None]:
        """Ends the block at the request's deadline, with ApiError 504."""
        with anyio.CancelScope(deadline=self._record.deadline) as scope:
            yield
        if scope.cancelled_caught:
            seconds = self._context.config.request_timeout
            raise ApiError(
                504,
                f"the answer was not ready within {seconds:g} s; ask for fewer tokens, or raise "
                "--request_timeout",
            )

    def failed(self, error: str) -> ApiError:
        """The error for an answer that failed."""
        if "stage guide" in error:  # the request's guide met a limit
            return self._job.refused(UserError(f"guide: {error}"))
        return ApiError(500, f"the answer failed: {error or 'nobody knows why'}")

    async def _of(self, answer: Answer) -> AsyncIterator[list[StreamOutput]]:
        try:
            async for batch in answer:
                yield batch
        except UserError as error:
            if self._context.engine.is_sleeping:  # it was asked for as the model went to sleep
                raise self._context.unavailable() from None
            raise self._job.refused(error) from None
        except EngineDied:
            raise self._context.unavailable() from None

    async def _watch(self) -> None:
        """Aborts the answers when the client disconnects."""
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.client_is_gone = True
        for answer in self._answers:
            answer.abort()

    def _leave(self) -> None:
        for answer in self._answers:
            answer.abort()
        self._context.admission.leave(self._num_answers, self._record.key)
        self._num_answers = 0


@contextlib.asynccontextmanager
async def _merged(
    streams: Sequence[AsyncIterator[list[StreamOutput]]],
) -> AsyncIterator[AsyncIterator[Pieces]]:
    """The items of several streams, each with its stream's index; an error ends all."""
    events: asyncio.Queue[Pieces | Exception | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[list[StreamOutput]]) -> None:
        try:
            async for batch in stream:
                events.put_nowait((index, batch))
            events.put_nowait(None)
        except Exception as error:
            events.put_nowait(error)

    async def merged() -> AsyncIterator[Pieces]:
        left = len(streams)
        while left:
            event = await events.get()
            if isinstance(event, Exception):
                raise event
            if event is None:
                left -= 1
            else:
                yield event

    tasks = [asyncio.create_task(pump(i, stream)) for i, stream in enumerate(streams)]
    try:
        yield merged()
    finally:
        for task in tasks:
            task.cancel()


class Encoder:
    """The wire format of a streamed answer."""

    media_type = "text/event-stream"

    def encode(self, prompt_index: int, pieces: list[StreamOutput]) -> bytes:
        """The bytes of these pieces; b"" where they have no text yet."""
        raise NotImplementedError

    async def settle(self, usage: Usage) -> None:
        """Completes the counts ahead of `finish`."""

    def finish(self, usage: Usage) -> bytes:
        """The bytes behind the last piece."""
        raise NotImplementedError

    def dress(self, error: ApiError) -> None:
        """Adds to an error, before anything was sent, the fields that clients of this form read."""

    def fail(self, error: ApiError) -> bytes:
        """The bytes that end a stream which fails after it has begun."""
        return b"data: " + error.body + b"\n\ndata: [DONE]\n\n"


class Stream(Response):
    """A streamed answer. The status is sent with the first pieces, as they may be a refusal.

    Pieces that have come together are sent together.
    """

    def __init__(self, run: Run, job: Job, encoder: Encoder) -> None:
        super().__init__(
            media_type=encoder.media_type,
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        del self.headers["content-length"]
        self._run, self._job, self._encoder = run, job, encoder
        self._said: list[str] = []  # of the first answer, for the log
        self._num_said = 0  # characters
        self._num_failed = 0  # answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers over ASGI. Raises ApiError where nothing was sent yet."""
        run, encoder = self._run, self._encoder
        has_begun = False
        async with run:
            try:
                with run.time():
                    async with contextlib.aclosing(run.pieces()) as batches:
                        async for index, pieces in batches:
                            self._check(pieces)
                            if run.is_logged:
                                self._note(index, pieces, scope)
                            body = encoder.encode(index, pieces)
                            if not has_begun:
                                has_begun = True
                                await self._begin(send)
                            if body:
                                await send({"type": BODY, "body": body, "more_body": True})
                await encoder.settle(self._job.usage)
                last = encoder.finish(self._job.usage)
            except ApiError as error:
                if not has_begun:
                    encoder.dress(error)
                    raise
                scope[RECORD].error = error.code
                last = encoder.fail(error)
            if run.client_is_gone:
                return
            if not has_begun:
                await self._begin(send)
            with anyio.move_on_after(1.0):  # the client may have stopped reading
                await send({"type": BODY, "body": last})

    def _note(self, prompt_index: int, pieces: list[StreamOutput], scope: Scope) -> None:
        """Notes the beginning of the first answer for the log."""
        if prompt_index == 0 and self._num_said < MAX_TEXT:
            new = "".join(piece.text for piece in pieces if piece.index == 0)
            self._said.append(new)
            self._num_said += len(new)
            scope[RECORD].log["answer"] = shortened("".join(self._said))

    def _check(self, pieces: list[StreamOutput]) -> None:
        """Counts tokens; raises ApiError where all answers have failed."""
        self._job.usage.num_output_tokens += sum(len(piece.token_ids) for piece in pieces)
        failed = [piece for piece in pieces if piece.finish_reason == "error"]
        if self._job.params.num_beams > 1:  # which come together, or fail as one
            failed = failed[:1] if len(failed) == len(pieces) else []
        self._num_failed += len(failed)
        params = self._job.params
        num_answers = len(self._job.prompts) * (1 if params.num_beams > 1 else params.n)
        if failed and self._num_failed == num_answers:
            raise self._run.failed(failed[0].error or "")

    async def _begin(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
