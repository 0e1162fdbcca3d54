"""Answers that are made while no client waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from starlette.requests import Request
from starlette.types import Message, Scope

from predict.server.answer_blocks import BlockEvents
from predict.server.context import RECORD, Context, Record
from predict.server.errors import ApiError
from predict.server.runs import BODY, Job, Run, Stream
from predict.system.notes import LOG


def answer_in_background(
    context: Context,
    record: Record,
    job: Job,
    events: BlockEvents,
    gone: asyncio.Event,
    sent: Callable[[bytes], None],
) -> asyncio.Task[None]:
    """The task that answers. record: of the request that asks, whose key, order and turn it has.

    gone: ends the answer when it is set. sent: takes each event.
    """
    deadline = asyncio.get_running_loop().time() + context.config.request_timeout
    request_id = record.request_id
    own = Record(request_id, deadline, key=record.key, priority=record.priority)
    scope: Scope = {"type": "http", RECORD: own}
    # The request may wait for this answer, which must not wait for a turn behind others then.
    turn = AsyncExitStack() if record.turn is None else record.turn.pop_all()

    async def receive() -> Message:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == BODY:
            take(message["body"])

    def take(body: bytes) -> None:
        for event in body.split(b"\n\n")[:-1]:
            sent(event + b"\n\n")

    async def answer() -> None:
        run = Run(context, Request(scope, receive), job, streamed=True)
        try:
            async with turn:
                await Stream(run, job, events)(scope, receive, send)
        except ApiError as error:
            take(events.fail(error))
        except Exception as error:
            LOG.error(f"the answer of {request_id} failed:", exc_info=error)
            take(events.fail(ApiError(500, f"the server failed; its log has more on {request_id}")))
        finally:
            context.lifecycle.leave()

    context.lifecycle.enter()
    return asyncio.create_task(answer())
