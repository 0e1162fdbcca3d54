"""The engines of all replicas as one: a second run, an error, counts of those that have gone."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install -e '.[ray]'", allow_module_level=True)

from ray.exceptions import RayActorError

from predict.engine.samples import StreamOutput
from predict.engine.stats import EngineStats
from predict.errors import UserError
from predict.request import RequestMetrics, RequestOutput, SamplingParams
from predict.scale_out.serving.engines import Engines, ServeReplicas
from predict.scale_out.serving.first_block import key_of
from predict.scale_out.serving.messages import AnswerPieces, Done, ReplicaCounts, decode_ask, encode
from predict.server.errors import ApiError
from predict.server.wire import AnswerMetrics, ModelInfo

INFO = ModelInfo(
    *("llama", "float32", "cpu", "dynamic", 100, 64, 2, 8, 16, (1,), None, "dense", None, 0.0)
)
METRICS = AnswerMetrics(3, 2, 0, 0, None, None, None, 0.1, ("stop",))
OUTPUT = RequestOutput(0, (1,), (5, 6), "ab", "stop", RequestMetrics(0.0, None, (), None))
PARAMS = SamplingParams(temperature=0.0)

Event = Any  # a message, an error that the call raises, or a future to wait for


class FakeResponse:
    """A call to a replica, by its script."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events
        self.is_cancelled = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for event in self._events:
            if isinstance(event, Exception):
                raise event
            if isinstance(event, asyncio.Event):
                await event.wait()
            else:
                yield encode(event)

    def cancel(self) -> None:
        self.is_cancelled = True


class FakeReplicas(ServeReplicas):
    """Replicas whose calls follow scripts, one for each call."""

    def __init__(self, *scripts: Sequence[Event]) -> None:
        self._scripts = list(scripts)
        self.calls: list[tuple[bytes, bytes]] = []
        self.responses: list[FakeResponse] = []
        self.told: Any = []

    def answer(self, key: bytes, ask: bytes) -> FakeResponse:
        self.calls.append((key, ask))
        self.responses.append(FakeResponse(self._scripts.pop(0)))
        return self.responses[-1]

    async def info(self) -> bytes:
        return encode(INFO)

    async def counts(self) -> list[Any]:
        if isinstance(self.told, Exception):
            raise self.told
        return list(self.told)


def pieces(text: str, reason: Any = None) -> AnswerPieces:
    return AnswerPieces([StreamOutput(text, (7,), reason)])


def run(
    replicas: FakeReplicas, task: Callable[[Engines], Coroutine[Any, Any, Any]]
) -> tuple[Any, Engines]:
    ended: list[AnswerMetrics] = []

    async def main() -> tuple[Any, Engines]:
        engines = Engines(replicas, 2.0, ended.append)
        await engines.ready()
        return await asyncio.wait_for(task(engines), 30), engines

    return asyncio.run(main())


async def text_of(engines: Engines, streamed: bool = True) -> str:
    found = ""
    async for each in engines.add([1, 2], PARAMS, streamed=streamed):
        found += "".join(piece.text for piece in each)
    return found


def test_pieces_come_in_their_order_and_the_end_says_what_it_took() -> None:
    replicas = FakeReplicas([pieces("a"), pieces("b", "stop"), Done(METRICS)])

    async def task(engines: Engines) -> tuple[str, Any]:
        answer = engines.add([1, 2], PARAMS, streamed=True)
        text = "".join([piece.text async for each in answer for piece in each])
        return text, answer.metrics

    (text, metrics), engines = run(replicas, task)
    assert (text, metrics) == ("ab", METRICS)
    assert engines.num_in_flight == 0


def test_a_replica_gets_the_prompt_and_the_key_of_its_first_block() -> None:
    replicas = FakeReplicas([Done(METRICS, OUTPUT)])
    run(replicas, lambda engines: text_of(engines, streamed=False))
    ((key, ask),) = replicas.calls
    assert key == key_of([1, 2], INFO.block_size)
    asked = decode_ask(ask)
    assert (asked.prompt_token_ids, asked.params, asked.streamed) == ([1, 2], PARAMS, False)


def test_what_was_not_streaming_runs_once_more() -> None:
    replicas = FakeReplicas([RayActorError()], [pieces("a", "stop"), Done(METRICS)])
    text, _ = run(replicas, text_of)
    assert text == "a"
    assert len(replicas.calls) == 2
    assert replicas.calls[0] == replicas.calls[1]


def test_a_whole_answer_whose_replica_ends_before_its_last_word_runs_once_more() -> None:
    replicas = FakeReplicas(
        [pieces("lost", "stop"), RayActorError()], [pieces("a", "stop"), Done(METRICS, OUTPUT)]
    )
    text, _ = run(replicas, lambda engines: text_of(engines, streamed=False))
    assert text == "a"


def test_a_stream_that_breaks_is_an_error_behind_its_pieces() -> None:
    found: list[str] = []

    async def task(engines: Engines) -> None:
        read = asyncio.Event()
        replicas._scripts.append([pieces("a"), read, RayActorError()])
        async for each in engines.add([1], PARAMS, streamed=True):
            found.extend(piece.text for piece in each)
            read.set()

    replicas = FakeReplicas()
    with pytest.raises(ApiError, match="in the middle of the answer") as caught:
        run(replicas, task)
    assert (caught.value.status, caught.value.headers) == (503, {"Retry-After": "2"})
    assert found == ["a"]
    assert len(replicas.calls) == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_a_second_death_is_an_error(streamed: bool) -> None:
    replicas = FakeReplicas([RayActorError()], [RayActorError()], [Done(METRICS, OUTPUT)])
    with pytest.raises(ApiError, match="so did the one that took over"):
        run(replicas, lambda engines: text_of(engines, streamed))
    assert len(replicas.calls) == 2


def test_an_end_without_a_last_word_counts_as_a_death() -> None:
    replicas = FakeReplicas([], [pieces("a", "stop"), Done(METRICS)])
    assert run(replicas, text_of)[0] == "a"


def test_a_refusal_is_the_engines_own_and_is_not_tried_again() -> None:
    replicas = FakeReplicas([Done(None, refused="top_k is too large")])
    with pytest.raises(UserError, match="top_k is too large"):
        run(replicas, text_of)
    assert len(replicas.calls) == 1


def test_an_abort_ends_the_call_and_the_iteration() -> None:
    async def task(engines: Engines) -> list[str]:
        replicas._scripts.append([pieces("a"), asyncio.Event()])
        answer = engines.add([1], PARAMS, streamed=True)
        found = []
        async for each in answer:
            found += [piece.text for piece in each]
            answer.abort()
            answer.abort()
        return found

    replicas = FakeReplicas()
    found, engines = run(replicas, task)
    assert found == ["a"]
    assert replicas.responses[0].is_cancelled
    assert engines.num_in_flight == 0


def counts(replica: str, num_steps: int, num_running: int) -> bytes:
    return encode(ReplicaCounts(replica, EngineStats(num_steps=num_steps, num_running=num_running)))


def test_counts_are_those_of_all_replicas_and_never_fall() -> None:
    replicas = FakeReplicas()

    async def task(engines: Engines) -> list[tuple[int, int]]:
        found = []
        for told in (
            [counts("a", 5, 1), counts("b", 7, 2)],
            [counts("a", 6, 1), RayActorError()],
            RayActorError(),
            [counts("a", 6, 1), counts("c", 1, 1)],
        ):
            replicas.told = told
            stats = await engines.stats()
            found.append((stats.num_steps, stats.num_running))
        return found

    assert run(replicas, task)[0] == [(12, 3), (13, 1), (13, 0), (14, 2)]
