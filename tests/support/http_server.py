"""The server's application over real sockets, on a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import uvicorn
from typing_extensions import Self

from predict.config.engine import EngineConfig
from predict.loading.model import read_spec
from predict.server.access_log import AccessLog
from predict.server.app import create_app
from predict.server.config import ServerConfig
from predict.server.engine_client import EngineClient, EngineHandle, EngineProcess
from predict.server.front_model import FrontModel
from predict.server.http_protocol import uvicorn_settings
from predict.server.lifecycle import Lifecycle
from predict.server.run import listen
from predict.server.tracing import Tracer
from predict.sight import reader_of
from predict.text.tokenizer import Tokenizer
from tests.support.scripted_engine import Script, ScriptedEngine

SECONDS = 60.0  # for anything, on a busy machine


def config_of(
    model: Path, template: Path | None = None, max_length: int = 256, **changes: Any
) -> ServerConfig:
    engine = EngineConfig(
        model_name_or_path=str(model),
        max_length=max_length,
        batch_size=8,
        chat_template=None if template is None else str(template),
    )
    return ServerConfig(engine=engine, **{"served_model_names": ("test",), **changes})


class HttpServer:
    """Answers for the length of a `with` block."""

    def __init__(
        self,
        config: ServerConfig,
        engine: EngineHandle,
        start: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """start: awaited on the server's loop, before anything is answered."""
        model = config.engine.model
        folder = Path(model.model_name_or_path)
        self.lines: list[str] = []  # of the access log
        self.config = config
        self.lifecycle = Lifecycle()
        self._start = start
        self._log = AccessLog(self.lines.append)
        tokenizer = Tokenizer.from_dir(folder, model.chat_template)
        has_model = (folder / "config.json").exists()  # others have a tokenizer alone
        pictures = reader_of(config.engine, read_spec(folder)[0]) if has_model else None
        front = FrontModel(tokenizer, config, pictures)
        self._tracer = None
        if config.otlp_traces_endpoint is not None:
            self._tracer = Tracer(config.otlp_traces_endpoint)
        app = create_app(
            *(engine, front, config),
            lifecycle=self.lifecycle,
            log=self._log,
            tracer=self._tracer,
        )
        self._listening = listen("127.0.0.1", 0)
        self._server = uvicorn.Server(uvicorn.Config(app, **uvicorn_settings(config)))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(SECONDS)
        return self

    def __exit__(self, *raised: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(SECONDS)
        self._log.close()
        if self._tracer is not None:
            self._tracer.close()
        self._listening.close()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listening.getsockname()[:2]
        return host, port

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=SECONDS)

    def call(self, function: Callable[[], Any]) -> Any:
        """What a function returns on the server's loop."""

        async def run() -> Any:
            return function()

        return self.run(run())

    def run(self, task: Coroutine[Any, Any, Any]) -> Any:
        """What a task returns on the server's loop."""
        return asyncio.run_coroutine_threadsafe(task, self._loop).result(SECONDS)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once a condition holds on the server's loop; fails after SECONDS."""

        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.002)

        task = asyncio.wait_for(poll(), SECONDS)
        asyncio.run_coroutine_threadsafe(_awaited(task), self._loop).result(2 * SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        if self._start is not None:
            self._loop.run_until_complete(self._start())
        self._loop.call_soon(self._started.set)
        self._loop.run_until_complete(self._server.serve(sockets=[self._listening]))


async def _awaited(task: Any) -> None:
    await task


class ScriptedServer(HttpServer):
    """One whose engine's script may be changed meanwhile."""

    def __init__(self, config: ServerConfig, script: Script) -> None:
        self.engine = ScriptedEngine(Path(config.engine.model.model_name_or_path), script)
        super().__init__(config, self.engine)


class ModelServer(HttpServer):
    def __init__(self, config: ServerConfig) -> None:
        self._process = EngineProcess()
        self._process.send_config(config.engine)
        self.client = EngineClient(self._process)
        super().__init__(config, self.client, self._load)

    async def _load(self) -> None:
        await self.client.connect()
        await self.client.ready()

    def __exit__(self, *raised: object) -> None:
        self._process.kill()
        super().__exit__(*raised)
