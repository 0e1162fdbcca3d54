"""A server as its user starts and ends it: both processes, signals, exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from predict.device import library
from tests.server.engines import SECONDS
from tests.support import tiny
from tests.support.paths import DEMO, ROOT
from tests.support.rank_runs import children, is_gone, wait_until
from tests.support.signals import as_from_a_terminal

ASKED = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "ignore_eos": True}


class Server:
    """A server's process, the lines that it says, and where it listens."""

    def __init__(self, model: Path, *words: str):
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "predict.server", "--model_name_or_path", str(model)),
                *("--dtype", "float32", "--device", "cpu", "--port", "0", "--block_size", "16"),
                *("--max_length", "256", "--append_attn", "--access_log", "false", *words),
            ],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=as_from_a_terminal,
        )
        self.said: list[str] = []

    def until(self, text: str) -> str:
        """The first line with this text; fails where the process ends without it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if text in line:
                return line
        raise AssertionError(f"it ended without saying {text!r}: {self.said}")

    def ended(self) -> tuple[int, str]:
        """The exit status and all that was said, once nobody has its stderr: both ended."""
        assert self.process.stderr is not None
        self.said += self.process.stderr
        return self.process.wait(SECONDS), "".join(self.said)

    @property
    def engine_process_id(self) -> int:
        process_id = self.process.pid
        children = Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()
        commands = {int(c): Path(f"/proc/{c}/cmdline").read_text() for c in children}
        (found,) = [child for child, command in commands.items() if "engine_process" in command]
        return found


@contextmanager
def started(model: Path, *words: str) -> Iterator[tuple[Server, str]]:
    """A server whose model is loaded, and its address."""
    server = Server(model, *words)
    try:
        address = server.until("listening on").split()[2].rstrip(";")
        server.until("ready:")
        yield server, address
    finally:
        server.process.kill()
        server.process.wait()


def run(address: str, main: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, Any]]) -> Any:
    async def within() -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(address, connector=connector) as session:
            return await asyncio.wait_for(main(session), SECONDS)

    return asyncio.run(within())


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """What a stream says; fails where it ends without its last word."""
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise AssertionError("the stream was cut")


async def count(session: aiohttp.ClientSession, name: str) -> float:
    """A number of /metrics."""
    async with session.get("/metrics") as response:
        found = re.search(rf"^{name} (\S+)$", await response.text(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.slow
def test_drafts_are_counted_by_request_and_by_position() -> None:
    words = (
        *("--speculate_method", "inference_with_reference", "--speculate_max_ngram_size", "3"),
        *("--speculate_max_draft_token_num", "5"),
    )

    async def main(session: aiohttp.ClientSession) -> None:
        said: Counter[str] = Counter()
        name, place = "regatta_spec_decode_num_", 'per_pos_total{position="%s"}'
        text = ""
        while place % 1 not in text:  # drafts come where steps' times say that they pay
            body = {
                **ASKED,
                "model": "demo_model",
                "prompt": "    print(i)\nfor i in range(10):\n" * 5,
                "max_tokens": 100,
            }
            async with session.post("/v1/completions", json=body) as response:
                usage = (await response.json())["usage"]
            assert usage["completion_tokens"] == 100
            said.update(usage.get("completion_tokens_details", {}))
            async with session.get("/metrics") as response:
                text = await response.text()
        drafts = await count(session, f"{name}draft_tokens_total")
        accepted = await count(session, f"{name}accepted_tokens_total")
        assert said == {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafts - accepted,
        }
        first, second = [
            await count(session, f"{name}accepted_tokens_{re.escape(place % each)}")
            for each in range(2)
        ]
        assert await count(session, f"{name}drafts_total") >= first >= second > 0
        assert accepted >= first + second

    with started(DEMO, *words) as (_, address):
        run(address, main)


def test_a_server_answers_counts_and_drains(model: Path) -> None:
    async def main(session: aiohttp.ClientSession) -> None:
        async with session.post("/v1/completions", json={**ASKED, "max_tokens": 200}) as response:
            expected = (await response.json())["choices"][0]["text"]
        assert await count(session, "regatta_generation_tokens_total") == 200
        assert await count(session, "regatta_num_requests_running") == 0
        assert await count(session, "regatta_engine_up") == 1
        begun = [asyncio.Event() for _ in range(6)]

        async def stream(index: int) -> str:
            body = {**ASKED, "max_tokens": 200, "stream": True}
            text = ""
            async with session.post("/v1/completions", json=body) as response:
                async for event in events(response):
                    begun[index].set()
                    text += event["choices"][0]["text"] if event["choices"] else ""
            return text

        streams = [asyncio.create_task(stream(index)) for index in range(6)]
        for event in begun:
            await event.wait()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(server.until, "running requests are finished first")
        async with session.post("/v1/completions", json=ASKED) as response:
            assert response.status == 503
            assert "Retry-After" in response.headers
        async with session.get("/ready") as response:
            assert response.status == 503
        assert await asyncio.gather(*streams) == [expected] * 6

    with started(model, "--batch_size", "8") as (server, address):
        run(address, main)
        status, said = server.ended()
    assert status == 0
    assert "error" not in said


def test_a_killed_engine_ends_the_server_with_an_error(model: Path) -> None:
    async def main(session: aiohttp.ClientSession) -> None:
        body = {**ASKED, "max_tokens": 200, "stream": True}
        async with session.post("/v1/completions", json=body) as response:
            said: list[dict[str, Any]] = []
            async for event in events(response):
                if not said:
                    os.kill(server.engine_process_id, signal.SIGKILL)
                said.append(event)
        assert "error" in said[-1]

    with started(model) as (server, address):
        run(address, main)
        status, said = server.ended()
    assert status == 1
    assert "the engine's process was ended by signal 9 (SIGKILL)" in said


@pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
def test_an_idle_server_whose_rank_is_killed_leaves_with_an_error() -> None:
    async def main(session: aiohttp.ClientSession) -> None:
        body: dict[str, Any] = {"model": "demo_model", "prompt": "def", "max_tokens": 8}
        async with session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            assert (await response.json())["usage"]["completion_tokens"] == 8

    words = ("--tensor_parallel_degree", "2", "--rank_timeout", "60")
    with started(DEMO, *words) as (server, address):
        run(address, main)
        ids = children(server.engine_process_id)
        assert len(ids) == 2
        os.kill(ids[1], signal.SIGKILL)
        status, said = server.ended()
        wait_until("all have ended", 60, lambda: all(map(is_gone, ids)))
    assert status == 1
    assert f"rank 1 (process {ids[1]}) was ended by signal 9 (SIGKILL)" in said


def test_a_second_signal_ends_both_processes_at_once(model: Path) -> None:
    async def main(session: aiohttp.ClientSession) -> None:
        body = {**ASKED, "max_tokens": 250, "stream": True, "n": 1}
        async with session.post("/v1/completions", json=body) as response:
            await anext(events(response))
            server.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(server.until, "SIGINT: 1 running")
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientError):
                await response.read()

    with started(model) as (server, address):
        run(address, main)
        status, _ = server.ended()
    assert status == 128 + signal.SIGTERM


def test_a_signal_while_the_model_loads_ends_with_0(model: Path) -> None:
    server = Server(model)
    server.until("listening on")
    server.process.send_signal(signal.SIGTERM)
    assert server.ended()[0] == 0


def test_a_taken_port_is_told_before_the_model_is_loaded(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = Server(model, "--port", str(port)).ended()
    assert status == 2
    assert f"--port {port}: Address already in use" in said
    assert "loading" not in said


def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model")
    (model / "model.safetensors").unlink()
    status, said = Server(model).ended()
    assert status == 2
    (error,) = [line for line in said.splitlines() if "error" in line]
    assert error.startswith(f"error: {model}")


@pytest.mark.slow
def test_a_storm_of_clients_leaves_nothing_behind(model: Path) -> None:
    rng = random.Random(0)

    async def main(session: aiohttp.ClientSession) -> None:
        async def client(index: int, leaves: bool, delay: float) -> None:
            body = {**ASKED, "prompt": [5, index % 300], "max_tokens": 64, "stream": True}
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200
                if leaves:
                    await asyncio.sleep(delay)
                    response.close()
                    return
                tokens = [event async for event in events(response)]
                assert tokens[-1]["choices"][0]["finish_reason"] == "length"

        await asyncio.gather(
            *(client(index, index % 2 > 0, rng.random() * 3) for index in range(500))
        )
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_used_blocks"):
            while await count(session, f"regatta_{name}"):
                await asyncio.sleep(0.1)

    with started(model, "--batch_size", "16", "--max_queue", "600") as (server, address):
        run(address, main)
        server.process.send_signal(signal.SIGTERM)
        assert server.ended()[0] == 0
