"""Several models in one server: which of them are awake, and whose requests run.

Each model has an engine process of its own. One of them loads, wakes or goes to sleep at a time.
Requests for models that are awake run at once while nobody waits. Who asks for another model waits,
and everybody who comes later waits behind: then those that run end, the models used longest ago go
to sleep until there is room, the wanted one wakes, and all who wait for it run. So models take
turns under any load, and none starves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import anyio

from predict.config.rest import Rest
from predict.errors import UserError
from predict.loading.memory import mib
from predict.server.engine_client import ChangeFailed, EngineClient, EngineDied
from predict.server.errors import ApiError
from predict.system.console import say


@dataclass(eq=False)
class Member:
    """A model of the server. num_bytes: what its weights and its cache take while it is awake."""

    name: str
    engine: EngineClient
    sleep_level: int  # 2 on a CPU, where level 1 leaves the weights where they are
    num_bytes: int = 0
    num_running: int = 0  # requests that have their turn
    last_used: int = 0  # turn

    @property
    def is_awake(self) -> bool:
        """Whether its engine answers."""
        return self.engine.is_ready and not self.engine.is_sleeping


class Rota:
    """The turns of several models. One event loop's."""

    def __init__(self, limit: int | None, say: Callable[[str], object] = say) -> None:
        """limit: bytes of all models that are awake together; None: one model at a time."""
        self._limit, self._say = limit, say
        self.members: list[Member] = []
        self._waiting: deque[tuple[Member, asyncio.Future[None]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._left = asyncio.Event()
        self._num_turns = 0
        self.most_bytes = 0  # of models that were awake together so far

    def check(self) -> None:
        """Raises UserError for a model that never fits."""
        for each in self.members:
            if self._limit is not None and each.num_bytes > self._limit:
                raise UserError(
                    f"--model_folders: {each.name} takes {mib(each.num_bytes)} MiB, weights and "
                    f"cache, and --max_models_bytes allows {mib(self._limit)} MiB; raise it, or "
                    "lower --num_cache_blocks, --batch_size or --max_length"
                )

    @contextlib.asynccontextmanager
    async def turn(self, member: Member, deadline: float) -> AsyncIterator[None]:
        """The length of a request for a model, which is awake then.

        deadline: of the event loop's clock. Raises ApiError 504 where it is over, EngineDied.
        """
        await self._enter(member, deadline)
        try:
            yield
        finally:
            self._leave(member)

    async def _enter(self, member: Member, deadline: float) -> None:
        if not self._waiting and member.is_awake:
            self._begin(member)
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append((member, turn))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._serve())
        with anyio.CancelScope(deadline=deadline) as scope:
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._leave(member)  # its turn came as the wait for it ended
                raise
            finally:
                if not turn.done() or turn.cancelled():
                    self._waiting = deque(each for each in self._waiting if each[1] is not turn)
        if scope.cancelled_caught:
            raise ApiError(504, f"{member.name} had no turn in time; try again later")

    def _begin(self, member: Member) -> None:
        member.num_running += 1
        self._num_turns += 1
        member.last_used = self._num_turns

    def _leave(self, member: Member) -> None:
        member.num_running -= 1
        self._left.set()

    async def _serve(self) -> None:
        """Gives turns until nobody waits."""
        while self._waiting:
            member = self._waiting[0][0]
            error: Exception | None = None
            try:
                await self._wake(member)
            except (EngineDied, ChangeFailed, UserError) as raised:
                error = raised
            ours = [each for each in self._waiting if each[0] is member]
            self._waiting = deque(each for each in self._waiting if each[0] is not member)
            for _, turn in ours:
                if turn.done():
                    continue
                if error is None:
                    self._begin(member)
                    turn.set_result(None)
                else:
                    turn.set_exception(
                        error
                        if isinstance(error, EngineDied)
                        else ApiError(503, f"{member.name} does not wake up: {error}")
                    )

    async def _wake(self, member: Member) -> None:
        if member.is_awake:
            return
        while not self._fits(member):
            awake = [each for each in self.members if each.is_awake]
            oldest = min(awake, key=lambda each: each.last_used)
            while oldest.num_running:
                self._left.clear()
                await self._left.wait()
            self._say(f"{oldest.name} goes to sleep, {member.name} wakes")
            await oldest.engine.rest(Rest("sleep", oldest.sleep_level))
        if member.engine.is_ready:
            await member.engine.rest(Rest("wake_up"))
        else:
            member.engine.go()
            await member.engine.ready()
        awake_bytes = sum(each.num_bytes for each in self.members if each.is_awake)
        self.most_bytes = max(self.most_bytes, awake_bytes)

    def _fits(self, member: Member) -> bool:
        awake = [each for each in self.members if each.is_awake]
        if not awake or self._limit is None:
            return not awake
        return sum(each.num_bytes for each in (*awake, member)) <= self._limit
