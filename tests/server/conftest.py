"""Fixtures of the server's tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from predict.request import SamplingParams
from tests.server.engines import write_model
from tests.support.http_server import SECONDS, ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

TEMPLATE = Path(__file__).parent / "templates" / "tools.jinja"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model for an engine in a process of its own."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    """A server whose engine answers "a" to everything."""

    def script(prompt: str, params: SamplingParams) -> list[str]:
        return ["a"]

    with ScriptedServer(config_of(TOKENIZER, TEMPLATE), script) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ScriptedServer) -> Iterator[httpx.Client]:
    """A client of `server`, or of the one that the test's module has in its place."""
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        yield client
