"""Engine processes for tests, each with the event loop that its client lives on."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from predict import EngineConfig, SamplingParams
from predict.engine.samples import StreamOutput
from predict.engine.stats import EngineStats
from predict.server.engine_client import EngineClient, EngineProcess
from predict.server.engine_process import Link
from predict.server.wire import Add, AnswerMetrics, FromEngine, FromFront, Stop
from tests.support import tiny
from tests.support.tiny import TOKENIZER

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
SECONDS = 120.0  # for anything, on a busy machine


def write_model(directory: Path) -> Path:
    """A tiny model with a tokenizer and a chat template; returns its directory."""
    tiny.write(directory, {"vocab_size": 342, "eos_token_id": 1})
    shutil.copytree(TOKENIZER, directory, dirs_exist_ok=True)
    return directory


def config(model: Path, **changes: Any) -> EngineConfig:
    values = {"max_length": 256, "attention": "append", "block_size": 16, "batch_size": 8}
    return EngineConfig(model_name_or_path=str(model), **{**values, **changes})


class Running:
    """An engine in its process, and the loop of its client."""

    def __init__(self, config: EngineConfig, process: EngineProcess):
        self.ended: list[AnswerMetrics] = []
        self.process = process
        self.process.send_config(config)
        self.client = EngineClient(self.process, self.ended.append)
        self._loop = asyncio.new_event_loop()
        self.run(self.client.connect())

    def run(self, task: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(asyncio.wait_for(task, SECONDS))

    def close(self) -> None:
        self.run(self.client.stop())
        self._loop.close()


@contextmanager
def running(config: EngineConfig, script: str | None = None) -> Iterator[Running]:
    """An engine that is loaded, or about to be, until the end of the block.

    script: of Python, which a process runs in the engine's place.
    """
    process = EngineProcess() if script is None else EngineProcess(("-c", script))
    engine = Running(config, process)
    try:
        yield engine
    finally:
        engine.close()


async def all_pieces(
    client: EngineClient, prompt: Sequence[int], params: SamplingParams, streamed: bool = True
) -> list[StreamOutput]:
    """The pieces of an answer, to its end."""
    answer = client.add(prompt, params, streamed=streamed)
    return [piece async for pieces in answer for piece in pieces]


def texts(pieces: Sequence[StreamOutput], count: int = 1) -> list[str]:
    """What pieces join to, per answer."""
    return ["".join(p.text for p in pieces if p.index == index) for index in range(count)]


async def nothing_runs(client: EngineClient) -> EngineStats:
    """The counts once no request runs and no block is used; Running.run waits for no more."""
    while True:
        stats = await client.stats()
        if not (stats.num_running or stats.num_waiting or stats.num_used_blocks):
            return stats
        await asyncio.sleep(0.005)


class ScriptedLink(Link):
    """A link whose front says what it is told to, and then waits until nothing runs."""

    def __init__(self, messages: Sequence[FromFront]):
        self._messages_left = [*messages]
        self.sent: list[FromEngine] = []

    def received(self, wait: bool) -> list[FromFront]:
        if self._messages_left:
            messages, self._messages_left = self._messages_left, []
            return messages
        return [Stop()] if wait else []

    def send(self, message: FromEngine) -> None:
        self.sent.append(message)

    send_all = send


def adds(count: int, streamed: bool = True) -> list[FromFront]:
    return [Add(index, [5, 6, 7 + index], GREEDY, streamed, 0.0) for index in range(count)]
