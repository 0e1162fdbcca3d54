"""A server over ranks: it answers, and it ends where one of them does."""

from __future__ import annotations

import os
import signal
from typing import Any

import aiohttp
import pytest

from predict.device import library
from tests.server.test_run import run, started
from tests.support.paths import DEMO
from tests.support.rank_runs import children, is_gone, wait_until

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")


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
        wait_until("all have ended", 5, lambda: all(map(is_gone, ids)))
    assert status == 1
    assert f"rank 1 (process {ids[1]}) was ended by signal 9 (SIGKILL)" in said
