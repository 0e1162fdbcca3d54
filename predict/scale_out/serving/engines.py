"""The engines of all replicas as the one Engine that a front sees.

A request whose replica dies before a piece of its answer was sent runs once more, on another one.
One that was streaming ends in an error: what a second run would say need not go on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from predict.config.adapters import Change
from predict.config.rest import Rest
from predict.engine.embedding import Text
from predict.engine.samples import StreamOutput
from predict.engine.stats import EngineStats, metrics
from predict.errors import UserError
from predict.images.placed import Pictures
from predict.request import RequestOutput, SamplingParams
from predict.scale_out.serving.first_block import key_of
from predict.scale_out.serving.messages import (
    Done,
    PromptAsk,
    decode_counts,
    decode_info,
    decode_said,
    encode,
)
from predict.server.errors import ApiError
from predict.server.wire import AnswerMetrics, ModelInfo
from predict.system.console import say

LOST = (RayError, RayServeException)  # what calls to a replica that has died raise
COUNT_SECONDS = 4.0  # that replicas may take to tell their counts
FIXED = "adapters of replicas are fixed; give them with --lora_modules, prefixes with --prefix_path"
NUM_RUNS = 2  # of a request, at most


class ServeReplicas:
    """The replicas of a deployment, as a front calls them."""

    def __init__(self, handle: Any) -> None:
        """handle: Ray Serve's, of the deployment of predict.scale_out.serving.replica."""
        self._handle = handle
        self._streaming = handle.options(stream=True)

    def answer(self, key: bytes, ask: bytes) -> Any:
        """Has the replica that `key` belongs to answer: bytes to iterate over, until `cancel`."""
        return self._streaming.answer.remote(key, ask)

    async def info(self) -> bytes:
        """What any of them says of its model."""
        found: bytes = await self._handle.info.remote()
        return found

    async def counts(self) -> list[Any]:
        """What each of them has counted, or an error in its place."""
        response = self._handle.broadcast("counts")
        found: list[Any] = await response.results_async(
            timeout_s=COUNT_SECONDS, return_exceptions=True
        )
        return found


class RemoteAnswer:
    """An Answer of some replica. One task iterates over it."""

    def __init__(self, engines: Engines, request_id: int, key: bytes, ask: PromptAsk) -> None:
        self.request_id = request_id
        self.metrics: AnswerMetrics | None = None
        self.output: RequestOutput | None = None
        self._engines = engines
        self._key = key
        self._ask = ask
        self._pieces: list[StreamOutput] = []
        self._has_begun = False  # a piece was given away
        self._has_ended = False
        self._error: Exception | None = None
        self._news = asyncio.Event()
        self._response: Any = None
        self._task = asyncio.create_task(self._run())

    def __aiter__(self) -> AsyncIterator[list[StreamOutput]]:
        return self

    async def __anext__(self) -> list[StreamOutput]:
        """The pieces that have come since the last time. Raises UserError, ApiError 503."""
        while not self._pieces:
            if self._has_ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        self._has_begun = True
        pieces, self._pieces = self._pieces, []
        return pieces

    def abort(self) -> None:
        """Ends the request; the iteration ends after the pieces that have come."""
        if not self._has_ended:
            if self._response is not None:
                self._response.cancel()
            self._task.cancel()
            self._end()

    async def _run(self) -> None:
        try:
            for number in range(1, NUM_RUNS + 1):
                self._response = self._engines.replicas.answer(self._key, encode(self._ask))
                try:
                    if await self._take(self._response):
                        break
                    lost = "it has left the answer off"
                except LOST as error:
                    lost = type(error).__name__
                if self._has_begun or number == NUM_RUNS:
                    self._error = self._engines.broken_off(self._has_begun)
                    break
                # Pieces that the caller has not seen are dropped: the second run sends them again.
                self._pieces.clear()
                say(f"a replica has ended ({lost}): request {self.request_id} runs again")
        except Exception as error:
            self._error = error
        finally:
            self._end()

    async def _take(self, response: Any) -> bool:
        """Takes what a replica says; whether it came to an end."""
        async for data in response:
            said = decode_said(data)
            if isinstance(said, Done):
                self.metrics, self.output = said.metrics, said.output
                if said.refused is not None:
                    self._error = UserError(said.refused)
                elif said.metrics is not None:
                    self._engines.on_ended(said.metrics)
                return True
            self._pieces += said.pieces
            if self._ask.streamed:
                self._news.set()
        return False

    def _end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._engines.num_in_flight -= self._ask.params.num_samples
            self._news.set()


class Engines:
    """The Engine of a front (predict.server.engine_client): the engines of all replicas."""

    def __init__(
        self,
        replicas: ServeReplicas,
        retry_after: float,
        on_ended: Callable[[AnswerMetrics], None] = lambda _: None,
    ) -> None:
        """retry_after: seconds. on_ended: takes what each answer took, when it has ended."""
        self.replicas = replicas
        self.on_ended = on_ended
        self.num_in_flight = 0
        self._retry_after = str(max(1, round(retry_after)))
        self._info: ModelInfo | None = None
        self._num_asked = 0
        self._counts: dict[str, EngineStats] = {}  # of each replica that there was, as it said last

    @property
    def info(self) -> ModelInfo:
        if self._info is None:
            raise RuntimeError("the model is not loaded yet")
        return self._info

    @property
    def is_ready(self) -> bool:
        return self._info is not None

    @property
    def is_alive(self) -> bool:
        """Always: Ray Serve puts a replica in the place of one that dies."""
        return True

    @property
    def failure(self) -> str | None:
        return None

    async def ready(self) -> None:
        """Returns once a replica has its model."""
        self._info = decode_info(await self.replicas.info())

    def add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        streamed: bool,
        pictures: Pictures | None = None,
    ) -> RemoteAnswer:
        assert pictures is None  # its front reads none
        self._num_asked += 1
        self.num_in_flight += params.num_samples
        key = key_of(prompt_token_ids, self.info.block_size)
        ask = PromptAsk(list(prompt_token_ids), params, streamed)
        return RemoteAnswer(self, self._num_asked, key, ask)

    async def stats(self) -> EngineStats:
        """Counts of all replicas together; those that have gone keep counting."""
        try:
            found = await self.replicas.counts()
        except (*LOST, TimeoutError):
            found = []
        told = [decode_counts(each) for each in found if isinstance(each, bytes)]
        names = {each.replica for each in told}
        self._counts |= {each.replica: each.stats for each in told}
        past = [stats for name, stats in self._counts.items() if name not in names]
        return summed([each.stats for each in told], past)

    is_sleeping = False

    async def rest(self, rest: Rest) -> None:
        """Replicas do not rest."""
        raise UserError(f"{rest.act} does not go with replicas on Ray yet")

    async def change(self, change: Change) -> None:
        """Raises UserError: a replica that comes later would not know the adapter."""
        raise UserError(FIXED)

    async def vectors(
        self, texts: Sequence[Text], scores: bool, adapter: str | None
    ) -> npt.NDArray[np.float32]:
        """Raises UserError: replicas answer prompts alone."""
        raise UserError("replicas on Ray make no vectors yet; start one server with regatta serve")

    def broken_off(self, has_begun: bool) -> ApiError:
        """The error for an answer whose replica has died."""
        what = "in the middle of the answer" if has_begun else "and so did the one that took over"
        return ApiError(
            503,
            f"the replica that was answering has ended, {what}; send the request again",
            headers={"Retry-After": self._retry_after},
        )


def summed(now: Sequence[EngineStats], past: Sequence[EngineStats]) -> EngineStats:
    """EngineStats of several engines as one's; of those in `past` what they have counted."""
    values: dict[str, Any] = {}
    for field, metric in metrics():
        counted = [getattr(each, field.name) for each in (now if metric.is_now else [*now, *past])]
        by_place = zip_longest(*counted, fillvalue=0) if metric.label else ()
        values[field.name] = tuple(map(sum, by_place)) if metric.label else sum(counted)
    return EngineStats(**values)
