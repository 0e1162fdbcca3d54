"""Two replicas of the demo model behind Ray Serve: load, the cache, and what a death costs.

The tests share one server, and run in their order: the last one ends it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from predict.errors import EXIT_USAGE
from predict.serve_ray import main
from tests.ray.processes import children, is_loopback, listening, named, started, until, until_gone
from tests.support.paths import DEMO

if importlib.util.find_spec("ray") is None:
    pytest.skip("needs Ray: pip install -e '.[ray]'", allow_module_level=True)
openai = pytest.importorskip("openai", reason="needs openai: pip install -e '.[test]'")

REPLICA = "ray::ServeReplica:regatta:engines"
SECONDS = 240.0  # for anything, on a busy machine
BLOCK = 64  # tokens
MODEL = (
    *("--model_name_or_path", str(DEMO), "--dtype", "float32", "--device", "cpu"),
    *("--append_attn", "--block_size", str(BLOCK)),
)
FLAGS = (
    *MODEL,
    *("--batch_size", "1", "--min_replicas", "1", "--max_replicas", "2"),
    *("--target_ongoing_requests", "1", "--port", "0", "--generation_config", "none"),
)


@dataclass
class Streamed:
    """A streamed answer so far."""

    text: str = ""
    num_chunks: int = 0
    reason: str | None = None
    error: Any = None
    has_begun: asyncio.Event = field(default_factory=asyncio.Event)


class Server:
    def __init__(self, process: subprocess.Popen[str], log: Path, url: str) -> None:
        self.process, self.log, self.url = process, log, url

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=SECONDS) as response:
            found = re.search(rf"^regatta_{name} (\S+)$", response.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])

    def replicas(self) -> list[int]:
        """Process ids of the replicas that there are, whether or not they are ready."""
        return named(self.process.pid, REPLICA)

    def wait_for_replicas(self, count: int) -> None:
        """Returns when so many answer."""
        until(lambda: self.num_ready() == count, self.process)

    def num_ready(self) -> int:
        """Replicas that have told their counts."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=SECONDS) as response:
            text = response.read().decode()
        blocks = re.search(r"^regatta_kv_cache_blocks (\S+)$", text, re.MULTILINE)
        return 0 if blocks is None else round(float(blocks[1])) // self.num_blocks

    num_blocks = 1  # of one replica's cache

    def run(self, task: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run(asyncio.wait_for(task, SECONDS))

    async def ask(self, prompt: Any, num_tokens: int, **more: Any) -> Any:
        """Asks for exactly so many tokens."""
        async with openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS
        ) as client:
            return await client.completions.create(
                model=DEMO.name,
                prompt=prompt,
                max_tokens=num_tokens,
                temperature=0,
                extra_body={"ignore_eos": True},
                **more,
            )

    async def stream(self, prompt: Any, num_tokens: int, into: Streamed) -> None:
        """Asks likewise, and takes down what comes."""
        client = openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS
        )
        try:
            async for chunk in await client.completions.create(
                model=DEMO.name,
                prompt=prompt,
                max_tokens=num_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            ):
                into.text += chunk.choices[0].text
                into.reason = chunk.choices[0].finish_reason
                into.num_chunks += 1
                into.has_begun.set()
        except openai.APIError as error:
            into.error = error
        finally:
            await client.close()


@pytest.fixture(scope="module")
def ray_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"

    def url() -> str | None:
        found = re.search(r"ready: .*; (http\S+)/v1", log.read_text())
        return None if found is None else found[1]

    with started(["-m", "predict.serve_ray", *FLAGS], log) as process:
        found = until(url, process)
        assert found is not None
        ray_server = Server(process, log, found)
        ray_server.num_blocks = round(ray_server.metric("kv_cache_blocks"))
        yield ray_server


def prompt(index: int) -> str:
    return f"# {index}\ndef function_{index}(items):\n"


@pytest.mark.slow
def test_load_brings_a_second_replica(ray_server: Server) -> None:
    assert ray_server.num_ready() == 1

    async def load() -> None:
        async def one(index: int) -> None:
            while await asyncio.to_thread(ray_server.num_ready) < 2:
                await ray_server.ask(prompt(index), 100)

        await asyncio.gather(*map(one, range(6)))

    ray_server.run(load())
    assert len(ray_server.replicas()) == 2


@pytest.mark.slow
def test_it_listens_on_the_loopback_interface_alone(ray_server: Server) -> None:
    addresses = listening(ray_server.process.pid)
    assert addresses
    assert [each for each in addresses if not is_loopback(each)] == []


@pytest.mark.slow
def test_prompts_with_the_same_first_block_share_it(ray_server: Server) -> None:
    before = ray_server.metric("prefix_cache_hits_total")

    async def ask() -> None:
        for first in range(4):
            for rest in range(3):
                await ray_server.ask([100 + first] * BLOCK + [200 + rest] * 8, 2)

    ray_server.run(ask())
    assert ray_server.metric("prefix_cache_hits_total") - before == 4 * 2 * BLOCK


@pytest.mark.slow
def test_a_client_that_goes_frees_its_replica(ray_server: Server) -> None:
    async def leave() -> None:
        streamed = Streamed()
        task = asyncio.create_task(ray_server.stream(prompt(0), 1000, streamed))
        await streamed.has_begun.wait()
        assert await asyncio.to_thread(ray_server.metric, "num_requests_running") == 1
        task.cancel()

    ray_server.run(leave())
    until(lambda: ray_server.metric("num_requests_running") == 0, ray_server.process)


@pytest.mark.slow
def test_a_killed_replica_breaks_its_stream_and_nothing_else(ray_server: Server) -> None:
    ray_server.wait_for_replicas(2)

    async def kill() -> tuple[list[Streamed], list[Streamed], list[str]]:
        streams = [Streamed() for _ in range(6)]
        tasks = [
            asyncio.create_task(ray_server.stream(prompt(index), 150, each))
            for index, each in enumerate(streams)
        ]
        # A batch holds one sequence: two that have begun and not ended are on two replicas.
        while len(running := [each for each in streams if each.num_chunks and not each.reason]) < 2:
            assert any(not task.done() for task in tasks)
            await asyncio.sleep(0.01)
        whole = [asyncio.create_task(ray_server.ask(prompt(index), 150)) for index in range(6)]
        os.kill(ray_server.replicas()[0], signal.SIGKILL)
        await asyncio.gather(*tasks)
        texts = [(await task).choices[0].text for task in whole]
        return streams, running, texts

    streams, running, texts = ray_server.run(kill())
    broken = [each for each in streams if each.error is not None]
    assert len(broken) == 1
    assert broken[0] in running
    assert "the replica that was answering has ended" in str(broken[0].error)
    assert broken[0].error.body["type"] == "server_error"
    for each, text in zip(streams, texts, strict=True):
        if each is not broken[0]:
            assert each.reason == "length"
            assert each.text == text
        else:
            assert text.startswith(each.text)


@pytest.mark.slow
def test_another_replica_takes_the_place_of_one_whose_engine_is_killed(ray_server: Server) -> None:
    ray_server.wait_for_replicas(2)
    before = ray_server.replicas()
    (engine,) = children(before[0])
    os.kill(engine, signal.SIGKILL)
    until(lambda: before[0] not in ray_server.replicas(), ray_server.process)
    ray_server.wait_for_replicas(2)
    texts = [ray_server.run(ray_server.ask(prompt(index), 5)).choices[0].text for index in range(4)]
    assert all(texts)


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_refuses_what_comes(ray_server: Server) -> None:
    async def ask_without_end() -> None:  # until the signal has come through
        while True:
            await ray_server.ask(prompt(1), 1)

    async def end() -> Streamed:
        streamed = Streamed()
        task = asyncio.create_task(ray_server.stream(prompt(0), 300, streamed))
        await streamed.has_begun.wait()
        ray_server.process.terminate()
        with pytest.raises(openai.APIStatusError, match="the server is ending") as caught:
            await ask_without_end()
        assert caught.value.status_code == 503
        await task
        return streamed

    family = children(ray_server.process.pid)
    streamed = ray_server.run(end())
    assert (streamed.error, streamed.reason) == (None, "length")
    assert ray_server.process.wait(SECONDS) == 0, ray_server.log.read_text()
    assert until_gone(family) == []


REFUSED = {
    "--max_replicas 1 is less than --min_replicas 2": (
        *("--min_replicas", "2", "--max_replicas", "1"),
    ),
    "each replica is given one of its own": ("--device", "gpu:1"),
    "cannot listen on --host": ("--port", "1", "--host", "203.0.113.1"),
    "--data_file": ("--data_file", "prompts.jsonl"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_flags_are_refused_before_ray_starts(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MODEL, *REFUSED[words]]) == EXIT_USAGE
    assert words in capsys.readouterr().err
