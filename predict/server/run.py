"""The life of a server: both processes start, answer, and end together.

The port is bound before anything slow, and /health answers while the model loads; /ready answers
200 once it is loaded, until the server drains. SIGTERM, Ctrl-C and SIGHUP drain: new requests are
refused, running ones are finished. A second signal ends both processes at once. When the engine
ends, waiting requests fail, and the front ends too.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import uvicorn
import uvloop
from starlette.types import ASGIApp

from predict.errors import EXIT_FAILURE, UserError
from predict.server.access_log import AccessLog
from predict.server.app import create_app
from predict.server.config import ServerConfig
from predict.server.engine_client import EngineClient, EngineDied, EngineProcess
from predict.server.front_model import FrontModel
from predict.server.http_protocol import uvicorn_settings
from predict.server.lifecycle import Lifecycle
from predict.server.metrics import Metrics
from predict.server.several import Several, started
from predict.server.tracing import Tracer
from predict.system.console import say
from predict.system.json_lines import JsonLines
from predict.system.signals import NUMBERS

BACKLOG = 2048  # connections that wait to be accepted
SPARE_FILES = 256  # besides those of connections
# A front that is behind holds a hundred thousand pieces, none of them garbage: collections that
# looked through them took three quarters of its time.
GC_THRESHOLDS = 50_000, 20, 100
CLOSE_SECONDS = 5.0  # for clients to read the last of their answers


def run(
    config: ServerConfig,
    notes: Sequence[str] = (),
    more_ports: Sequence[int] = (),
    several: Mapping[str, ServerConfig] | None = None,
) -> int:
    """Runs a server to its end; the exit status. Raises UserError before a weight is read.

    notes: lines to print at the start. more_ports: further ports to listen on. several: models by
    name, of which `config` is the first one's; None: there is one.
    """
    with contextlib.ExitStack() as stack:
        if config.log_format == "json":
            stack.enter_context(contextlib.redirect_stderr(JsonLines(sys.stderr, "front")))
        tracer = None
        if config.otlp_traces_endpoint is not None:
            tracer = Tracer(config.otlp_traces_endpoint)
            stack.callback(tracer.close)
        listening = [
            stack.enter_context(listen(config.host, port)) for port in (config.port, *more_ports)
        ]
        for note in notes:
            say(f"note: {note}")
        allow_files(config.max_connections + SPARE_FILES)
        processes: list[EngineProcess] = []
        lifecycle, log = Lifecycle(), AccessLog() if config.access_log else None
        try:
            if several is not None:
                started(several, processes.append)
                engines = Several(several, processes, lifecycle, log, tracer)
                served = Served(engines, engines.app, engines.say_ready)
            else:
                processes.append(EngineProcess(log_format=config.log_format))
                processes[0].send_config(config.engine)
                front = FrontModel.load(config)  # beside the engine, which takes longer
                served = one(config, processes[0], front, lifecycle, log, tracer)
            return uvloop.run(Front(config, processes, served, listening, lifecycle, log).serve())
        finally:
            for process in processes:
                process.kill()


class Served(NamedTuple):
    """What a front serves. say_ready(url): called once requests are answered."""

    engine: EngineClient | Several
    app: ASGIApp
    say_ready: Callable[[str], None]


def one(
    config: ServerConfig,
    process: EngineProcess,
    front: FrontModel,
    lifecycle: Lifecycle,
    log: AccessLog | None,
    tracer: Tracer | None = None,
) -> Served:
    """One model. process: started, its config sent."""
    metrics = Metrics()
    engine = EngineClient(process, metrics.answer_ended)
    app = create_app(
        *(engine, front, config), lifecycle=lifecycle, metrics=metrics, log=log, tracer=tracer
    )

    def say_ready(url: str) -> None:
        info = engine.info
        say(
            f"ready: {config.model_names[0]} on {info.device} in {info.dtype}, loaded in "
            f"{info.startup_seconds:.1f} s; {info.batch_size} sequences of up to "
            f"{info.max_length} tokens, {info.num_cache_blocks} cache blocks of "
            f"{info.block_size}; {url}/v1"
        )

    return Served(engine, app, say_ready)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises UserError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"--host {host} is no address of this machine: {getattr(error, 'strerror', error)}; "
            "127.0.0.1 is for this machine alone, 0.0.0.0 for others too"
        ) from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}; end what listens "
            "there, or give another --port (0 takes one that is free)"
        ) from None
    return sock


def allow_files(count: int) -> None:
    """Raises this process's limit of open files to `count`, or to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: Front takes the signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Front:
    """The front's process: serves HTTP, and watches the engine and signals."""

    def __init__(
        self,
        config: ServerConfig,
        processes: Sequence[EngineProcess],
        served: Served,
        listening: Sequence[socket.socket],
        lifecycle: Lifecycle,
        log: AccessLog | None,
    ):
        """processes: started, their configs sent. listening: the first is the one in messages."""
        self._config = config
        self._processes = processes
        self._listening = listening
        self._lifecycle, self._log = lifecycle, log
        self._engine, self._say_ready = served.engine, served.say_ready
        self._http = _Uvicorn(
            uvicorn.Config(
                served.app,
                timeout_graceful_shutdown=round(CLOSE_SECONDS),
                backlog=BACKLOG,
                **uvicorn_settings(config),
            )
        )
        self._signal: int | None = None

    async def serve(self) -> int:
        """Answers until a signal or the engine's end; the exit status. Raises UserError."""
        await self._engine.connect()
        asked = asyncio.Event()
        with self._signals(asked):
            http = asyncio.create_task(self._http.serve(sockets=list(self._listening)))
            say(f"listening on {self._url}; the model is loading")
            waits = [asyncio.create_task(each) for each in (asked.wait(), self._engine.died())]
            try:
                loading = asyncio.create_task(self._load())
                await asyncio.wait([*waits, loading, http], return_when=asyncio.FIRST_COMPLETED)
                if loading.done():
                    await loading  # raises what keeps the models from being served
                else:
                    loading.cancel()
                await asyncio.wait([*waits, http], return_when=asyncio.FIRST_COMPLETED)
                if http.done():
                    await http  # raises what ended it
                return await (self._drain(http) if self._engine.is_alive else self._mourn(http))
            finally:
                for task in waits:
                    task.cancel()

    @property
    def _url(self) -> str:
        host, port = self._listening[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _load(self) -> None:
        with contextlib.suppress(EngineDied):  # its end is waited for, too
            try:
                await self._engine.ready()
            except UserError:
                if self._engine.is_alive:  # else its last words say why
                    raise
                return
            # Collections skip the objects that are alive now: they stay.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            self._say_ready(self._url)

    @contextlib.contextmanager
    def _signals(self, asked: asyncio.Event) -> Iterator[None]:
        """Takes signals until the end of the block; the first sets `asked`."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if self._signal is not None:
                for process in self._processes:
                    process.kill()
                os._exit(128 + number)
            self._signal = number
            asked.set()

        # A signal that the caller ignores, as nohup does, stays ignored.
        taken = [each for each in NUMBERS if signal.getsignal(each) is not signal.SIG_IGN]
        for number in taken:
            loop.add_signal_handler(number, on_signal, number)
        try:
            yield
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    async def _drain(self, http: asyncio.Task[None]) -> int:
        """Finishes running requests, and ends both processes."""
        assert self._signal is not None
        self._lifecycle.drain()
        count = self._lifecycle.num_requests
        if count:
            name = signal.Signals(self._signal).name
            say(
                f"{name}: {count} running requests are finished first, new ones refused; once "
                "more ends at once"
            )
        idle = asyncio.create_task(self._lifecycle.wait_idle())
        died = asyncio.create_task(self._engine.died())
        await asyncio.wait(
            [idle, died], timeout=self._config.drain_timeout, return_when=asyncio.FIRST_COMPLETED
        )
        is_idle = idle.done()
        for task in (idle, died):
            task.cancel()
        if not self._engine.is_alive:
            return await self._mourn(http)
        if not is_idle:
            say(
                f"{self._lifecycle.num_requests} requests are broken off after --drain_timeout "
                f"{self._config.drain_timeout:g} s"
            )
        await self._close(http, at_once=not is_idle)
        await self._engine.stop()
        return 0 if is_idle else EXIT_FAILURE

    async def _mourn(self, http: asyncio.Task[None]) -> int:
        """Prints why the engine has ended, lets waiting requests fail, and ends."""
        self._lifecycle.drain()
        say(f"error: {await self._engine.last_words()}")
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._lifecycle.wait_idle(), CLOSE_SECONDS)
        await self._close(http)
        return self._engine.exit_code or EXIT_FAILURE

    async def _close(self, http: asyncio.Task[None], at_once: bool = False) -> None:
        """Ends HTTP. at_once: without waiting for responses."""
        self._http.should_exit, self._http.force_exit = True, at_once
        await http
        if self._log is not None:
            self._log.close()
