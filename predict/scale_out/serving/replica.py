"""A replica: an engine in a process of its own, as a server has it, that fronts reach over Ray."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from predict.config.engine import EngineConfig
from predict.errors import EXIT_FAILURE, UserError
from predict.scale_out.serving.loopback import listen_on_loopback
from predict.scale_out.serving.messages import AnswerPieces, Done, ReplicaCounts, decode_ask, encode
from predict.server.engine_client import EngineClient, EngineProcess
from predict.system.console import say


class Replica:
    """What Ray Serve makes one of in each replica's process.

    When its engine ends it ends, too: Ray puts another one in its place.
    """

    def __init__(self, config: EngineConfig, num_threads: int, on_loopback: bool) -> None:
        """Starts the engine. num_threads: of its operators, on a CPU. on_loopback: see there."""
        if on_loopback:
            listen_on_loopback()
        threads = ("-m", "predict.scale_out.serving.engine_process", str(num_threads))
        self._process = EngineProcess(threads) if config.model.device == "cpu" else EngineProcess()
        self._process.send_config(config)
        self._client = EngineClient(self._process)
        self._watch: asyncio.Task[None] | None = None

    async def reconfigure(self, config: dict[str, Any]) -> None:
        """Returns when the model is loaded: Ray Serve calls this before it sends requests.

        Raises UserError where it cannot be.
        """
        if self._watch is None:
            await self._client.connect()
            await self._client.ready()
            self._watch = asyncio.create_task(self._end_with_engine())

    async def answer(self, key: bytes, ask: bytes) -> AsyncIterator[bytes]:
        """Yields Pieces as they come, then Done. key: what the request was routed by.

        Leaving early aborts the answer. Raises EngineDied.
        """
        asked = decode_ask(ask)
        answer = self._client.add(asked.prompt_token_ids, asked.params, streamed=asked.streamed)
        try:
            async for pieces in answer:
                yield encode(AnswerPieces(pieces))
        except UserError as error:
            yield encode(Done(None, refused=str(error)))
            return
        finally:
            answer.abort()
        yield encode(Done(answer.metrics, answer.output))

    async def info(self) -> bytes:
        return encode(self._client.info)

    async def counts(self) -> bytes:
        name = serve.get_replica_context().replica_id.unique_id
        return encode(ReplicaCounts(name, await self._client.stats()))

    def check_health(self) -> None:
        """Raises RuntimeError when the engine has ended."""
        if not self._client.is_alive:
            raise RuntimeError(self._client.failure)

    async def __del__(self) -> None:
        """Ends the engine; Ray Serve calls this when requests have ended."""
        if self._watch is not None:
            self._watch.cancel()
        await self._client.stop()

    async def _end_with_engine(self) -> None:
        await self._client.died()
        say(f"this replica ends: {self._client.failure}")
        os._exit(EXIT_FAILURE)
