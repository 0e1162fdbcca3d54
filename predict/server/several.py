"""One server in front of several models, each with an engine process and an application of its own.

A request goes to the application of the model that its body names; see Rota for when it runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from predict.device.devices import kind_of
from predict.server.access_log import AccessLog
from predict.server.app import create_app
from predict.server.config import ServerConfig
from predict.server.context import REFUSED, Context
from predict.server.engine_client import EngineClient, EngineProcess
from predict.server.errors import ApiError
from predict.server.front_model import FrontModel
from predict.server.lifecycle import Lifecycle
from predict.server.limits import Admission, Held, late_bodies_refused
from predict.server.metrics import Metrics
from predict.server.rota import Member, Rota
from predict.server.tracing import Tracer
from predict.system.console import say

RESPONSES = "/v1/responses/"


class Several:
    """The engines of several models as one, and the application in front of them."""

    def __init__(
        self,
        configs: Mapping[str, ServerConfig],
        processes: Sequence[EngineProcess],
        lifecycle: Lifecycle,
        log: AccessLog | None,
        tracer: Tracer | None = None,
    ) -> None:
        """configs: by name. processes: of each, its config sent with `asks`."""
        first = next(iter(configs.values()))
        self.rota = Rota(first.max_models_bytes)
        self._clients: list[EngineClient] = []
        self._apps: dict[str, ASGIApp] = {}
        self._contexts: list[Context] = []
        metrics = Metrics()
        for (name, config), process in zip(configs.items(), processes, strict=True):
            engine = EngineClient(process, metrics.answer_ended)
            level = 1 if kind_of(config.engine.model.device) == "gpu" else 2
            member = Member(name, engine, level)
            self.rota.members.append(member)
            self._clients.append(engine)
            app = create_app(
                *(engine, FrontModel.load(config), config),
                lifecycle=lifecycle,
                metrics=metrics,
                log=log,
                tracer=tracer,
                take_turn=partial(self.rota.turn, member),
            )
            self._apps[name] = app
            self._contexts.append(app.state.context)
        for context in self._contexts:
            context.beside = [each for each in self._contexts if each is not context]
            context.models.beside = [each.models for each in context.beside]
            context.admission.count_with(self._contexts[0].admission)
        self.app: ASGIApp = _ByModel(self._apps, self._contexts, first)

    # What EngineClient has, of all of them.

    async def connect(self) -> None:
        """Begins to read the engines' messages."""
        for each in self._clients:
            await each.connect()

    async def ready(self) -> None:
        """Returns once all are known to fit, and the first is loaded. Raises as EngineClient."""
        for member in self.rota.members:
            member.num_bytes = await member.engine.needs()
        self.rota.check()
        loop = asyncio.get_running_loop()
        async with self.rota.turn(self.rota.members[0], loop.time() + 1e9):
            pass

    async def died(self) -> None:
        """Returns when one of them has ended."""
        waits = [asyncio.create_task(each.died()) for each in self._clients]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    @property
    def is_alive(self) -> bool:
        """Whether all processes run."""
        return all(each.is_alive for each in self._clients)

    @property
    def exit_code(self) -> int:
        """The exit status of this process once one of them has ended."""
        return next((each.exit_code for each in self._clients if not each.is_alive), 0)

    async def last_words(self) -> str:
        """Why one of them has ended, for the terminal."""
        for member in self.rota.members:
            if not member.engine.is_alive:
                return f"{member.name}: {await member.engine.last_words()}"
        return "nobody knows why"

    async def stop(self) -> None:
        """Ends all processes."""
        for each in self._clients:
            await each.stop()

    def say_ready(self, url: str) -> None:
        """Prints what there is."""
        names = ", ".join(member.name for member in self.rota.members)
        say(f"ready: {names}; {self.rota.members[0].name} is awake; {url}/v1")


class _ByModel:
    """ASGI: hands each request on to the application of its model."""

    def __init__(
        self, apps: Mapping[str, ASGIApp], contexts: Sequence[Context], config: ServerConfig
    ) -> None:
        self._apps, self._contexts = list(apps.values()), contexts
        self._config, self._admission = config, Admission(config)  # of bodies that are held here

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._apps[0]
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        if scope["path"].startswith(RESPONSES):
            app = self._of_response(scope["path"].removeprefix(RESPONSES).partition("/")[0])
        elif scope["method"] == "POST":
            with self._admission.body() as held:
                messages: list[Message] = []
                try:
                    body = await self._read(receive, messages, held)
                except ApiError as error:  # the application says so, once it has looked at the key
                    scope[REFUSED], body = error, b""
                await self._of_body(body)(scope, _again(messages, receive, held), send)
            return
        await app(scope, receive, send)

    def _of_response(self, response_id: str) -> ASGIApp:
        for app, context in zip(self._apps, self._contexts, strict=True):
            if any(entry.id == response_id for entry in context.store):
                return app
        return self._apps[0]

    def _of_body(self, body: bytes) -> ASGIApp:
        """The application of the model that a body names; the first where it names none of ours.

        That one reads the body again, and refuses what is wrong in it.
        """
        try:
            name = msgspec.json.decode(body, type=_Named).model
        except (msgspec.MsgspecError, RecursionError):
            return self._apps[0]
        for app, context in zip(self._apps, self._contexts, strict=True):
            if name in context.models.names:
                return app
        return self._apps[0]

    async def _read(self, receive: Receive, messages: list[Message], held: Held) -> bytes:
        """Adds the messages of a body; the body where it is not too large to look at.

        Raises ApiError where it does not come in time, or all bodies together are too large.
        """
        config = self._config
        with late_bodies_refused(config):
            while True:
                message = await receive()
                held.take(len(message.get("body", b"")))
                messages.append(message)
                if held.size > config.max_body_bytes:
                    return b""  # the application refuses it
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return b"".join(each.get("body", b"") for each in messages)


class _Named(msgspec.Struct):
    model: str = ""


def _again(messages: list[Message], receive: Receive, held: Held) -> Receive:
    """Gives messages again, which are held no longer then, and then what comes."""

    async def found() -> Message:
        if not messages:
            return await receive()
        message = messages.pop(0)
        held.take(-len(message.get("body", b"")))
        return message

    return found


def started(configs: Mapping[str, ServerConfig], keep: Callable[[EngineProcess], object]) -> None:
    """Starts an engine process for each model. keep: takes each at once, to end it."""
    for config in configs.values():
        process = EngineProcess(log_format=config.log_format)
        keep(process)
        process.send_config(config.engine, asks=True)
