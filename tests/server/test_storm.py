"""A storm of clients over all doors, half of which leave: nothing is left running behind them."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import aiohttp
import pytest

from predict.config.engine import EngineConfig
from predict.server.config import ServerConfig
from tests.support.http_server import SECONDS, ModelServer
from tests.support.paths import DEMO, ROOT

NUM_CLIENTS = 500
MESSAGES = [{"role": "user", "content": "def gcd(a, b):"}]
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def gcd(a, b):", "max_tokens": 24},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 24},
    "/v1/responses": {"input": "def gcd(a, b):", "max_output_tokens": 24},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 24},
}


@pytest.mark.slow
def test_nothing_runs_behind_clients_that_leave(record_property: Any) -> None:
    engine = EngineConfig(
        model_name_or_path=str(DEMO),
        dtype="float32",
        chat_template=str(ROOT / "examples" / "demo_template.jinja"),
        attention="append",
        batch_size=32,
    )
    draw = random.Random(5)

    async def storm(url: str) -> list[int]:
        timeout, connector = aiohttp.ClientTimeout(SECONDS), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

            async def ask(path: str, stream: bool) -> int:
                body = {**DOORS[path], "temperature": 0, "stream": stream}
                async with session.post(path, json=body) as response:
                    await response.read()
                    return response.status

            async def leave(path: str, stream: bool, seconds: float) -> int:
                try:
                    return await asyncio.wait_for(ask(path, stream), seconds)
                except asyncio.TimeoutError:
                    return 0

            several: list[Any] = []
            for number in range(NUM_CLIENTS):
                path, stream = draw.choice([*DOORS]), draw.random() < 0.5
                stays = number % 2
                seconds = draw.uniform(0.0, 2.0)
                several.append(ask(path, stream) if stays else leave(path, stream, seconds))
            return list(await asyncio.gather(*several))

    with ModelServer(ServerConfig(engine=engine)) as server:
        statuses = asyncio.run(storm(server.url))
        ended = time.monotonic()

        async def idle() -> Any:
            while True:
                stats = await server.client.stats()
                if not (stats.num_running or stats.num_waiting or stats.num_used_blocks):
                    return stats

        stats = server.run(asyncio.wait_for(idle(), SECONDS))
        record_property("seconds_until_idle", time.monotonic() - ended)
        print(f"idle {time.monotonic() - ended:.3f} s behind the last client")
        server.wait_until(lambda: server.lifecycle.num_requests == 0)
        assert set(statuses[1::2]) == {200}
        assert statuses[::2].count(0) > NUM_CLIENTS // 8, "many left"
        assert stats.num_used_blocks == 0 < stats.num_cache_blocks
        assert server.client.num_in_flight == 0
