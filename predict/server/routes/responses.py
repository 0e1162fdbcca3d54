"""/v1/responses: the next turn of a conversation of items, and the answers that are kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import anyio
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from predict.server.answer_blocks import whole
from predict.server.answers import to_json
from predict.server.background import answer_in_background
from predict.server.context import RECORD, Context, record_of
from predict.server.errors import ApiError, invalid
from predict.server.openapi import asks, errors, takes
from predict.server.protocol import Body, ChatBody, parsed
from predict.server.responses import Items, ResponsesBody, asked, kept_item, own_items
from predict.server.responses_events import ResponseEvents
from predict.server.routes._common import body_of, json_response, log_answer
from predict.server.runs import Run, Stream
from predict.server.store import Entry
from predict.server.turns import NameOf, Ready, ready_turn

BASE = "/v1/responses"
ONE = BASE + "/{response_id}"
MAX_PAGE = 100  # items of a page
_FOLLOW = {"starting_after": "integer", "stream": "boolean"}
_PAGE = {"limit": "integer", "order": "string", "after": "string"}


class _Kept(Body):
    """The items of a stored conversation."""

    input: Items


def router(context: Context) -> APIRouter:
    """The routes."""
    routes = APIRouter()

    @routes.post(BASE, openapi_extra=takes(ResponsesBody), responses=errors())
    async def create(request: Request) -> Response:
        """Answers a conversation of items."""
        async with body_of(context, request) as value:
            return await _answered(context, request, parsed(ResponsesBody, value))

    @routes.get(ONE, openapi_extra=asks(_FOLLOW), responses=errors())
    async def retrieve(request: Request, response_id: str) -> Response:
        """A response that was stored; a background one's stream from an event on."""
        entry = _found(context, request, response_id)
        if _flag(request, "stream"):
            return _followed(entry, _number(request, "starting_after", -1, 0, 1 << 53) + 1)
        return _object(entry)

    @routes.delete(ONE, responses=errors())
    async def delete(request: Request, response_id: str) -> Response:
        """Forgets a response; one that runs is ended."""
        context.store.remove(_found(context, request, response_id))
        return json_response({"id": response_id, "object": "response", "deleted": True})

    @routes.post(ONE + "/cancel", responses=errors())
    async def cancel(request: Request, response_id: str) -> Response:
        """Ends the answer of a background response; the response as it is then."""
        entry = _found(context, request, response_id)
        if entry.task is None:
            raise invalid(
                "response_id",
                f"{response_id} was not created with background true, and has ended; a streamed "
                "answer ends when its client goes",
            )
        entry.gone.set()
        await asyncio.wait([entry.task])
        return _object(entry)

    @routes.get(ONE + "/input_items", openapi_extra=asks(_PAGE), responses=errors())
    async def input_items(request: Request, response_id: str) -> Response:
        """The conversation ahead of a response, the latest item first."""
        entry = _found(context, request, response_id)
        items = entry.input_items()
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise invalid("order", f"order is {order[:80]!r} (allowed: asc, desc)")
        items = items if order == "asc" else items[::-1]
        after = request.query_params.get("after")
        if after is not None:
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise invalid("after", f"after {after[:80]!r} is no item of {response_id}")
            items = items[places[0] + 1 :]
        page = items[: _number(request, "limit", 20, 1, MAX_PAGE)]
        ids = [item["id"] for item in page] or [None]
        ends = {"first_id": ids[0], "last_id": ids[-1], "has_more": len(page) < len(items)}
        return json_response({"object": "list", "data": page, **ends})

    return routes


class _Followed(StreamingResponse):
    """A stream whose client has its request's time to read it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope(deadline=scope[RECORD].deadline):
            await super().__call__(scope, receive, send)


async def _answered(context: Context, request: Request, body: ResponsesBody) -> Response:
    """The answer to a body. Raises ApiError."""
    is_stored = _is_stored(context, body)
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream; set stream to true")
    kept = _earlier(context, request, body)
    chat, name_of = asked(body, _items(body, kept))
    ready = await _fitting(context, chat, name_of, cuts=body.truncation == "auto")
    events = ResponseEvents(context, ready, body, is_stored)
    entry: Entry | None = None
    if is_stored:
        items = [*kept, *map(kept_item, own_items(body))]
        response_id = events.response["id"]
        entry = Entry(record_of(request).key.digest, response_id, b"", to_json(items))
    if body.background:
        assert entry is not None
        return _started(context, request, ready, events, entry, bool(body.stream))
    if entry is not None:
        events.changed = _keeper(context, events, entry)
    job = ready.job
    if body.stream:
        return Stream(Run(context, request, job, streamed=True), job, events)
    async with Run(context, request, job, streamed=False) as run:
        (output,) = await run.outputs()
    log_answer(context, request, output.text)
    await whole(events, output)
    return json_response(events.response)


def _is_stored(context: Context, body: ResponsesBody) -> bool:
    """Whether the answer is kept. Raises ApiError 400 where it cannot be, and must."""
    if body.background and body.store is False:
        raise invalid("store", "store is false, and a background response is asked for later")
    if not context.store.is_open and (body.store or body.background):
        name = "store" if body.store else "background"
        raise invalid(
            name, f"{name} is true, and this server keeps no responses (--max_stored_responses 0)"
        )
    return context.store.is_open and body.store is not False


def _earlier(context: Context, request: Request, body: ResponsesBody) -> list[dict[str, Any]]:
    """The items of the conversation that a body goes on with. Raises ApiError 400, 404."""
    name, wanted = "previous_response_id", body.previous_response_id
    if wanted is None:
        return []
    entry = context.store.find(record_of(request).key.digest, wanted, name)
    if entry.is_running:
        raise invalid(name, f"{name} {wanted} has not ended; wait for it")
    response = entry.shown()
    if response["status"] == "failed":
        raise invalid(name, f"{name} {wanted} has failed; go on with the one before it")
    return [*entry.input_items(), *response["output"]]


def _items(body: ResponsesBody, kept: list[dict[str, Any]]) -> Sequence[Any]:
    """The kept items of a conversation. Raises ApiError 400 where nobody may send those."""
    try:
        return parsed(_Kept, {"input": kept}).input if kept else []
    except ApiError as error:
        name = "previous_response_id"
        raise invalid(
            name, f"{name} {body.previous_response_id} cannot go on: of it {error.message}"
        ) from None


def _keeper(context: Context, events: ResponseEvents, entry: Entry) -> Callable[[], None]:
    """Stores an answer when it has ended."""

    def changed() -> None:
        if events.response["status"] in ("completed", "incomplete"):
            entry.response = to_json(events.response)
            context.store.put(entry)

    return changed


def _started(
    context: Context,
    request: Request,
    ready: Ready,
    events: ResponseEvents,
    entry: Entry,
    is_streamed: bool,
) -> Response:
    """The response whose answer has been begun in the background, or its stream."""
    context.admission.check_room(record_of(request).key)
    entry.response = to_json(events.response)
    entry.events = [] if is_streamed else None
    if not context.store.put(entry):
        raise ApiError(
            429,
            "the store has no room for this response: it is full of those that run, or has fewer "
            "bytes (--max_stored_bytes)",
            headers={"Retry-After": context.retry_after},
        )

    def changed() -> None:
        entry.response = to_json(events.response)
        context.store.measure(entry)

    def sent(event: bytes) -> None:
        if entry.events is not None:
            entry.events.append(event)
            context.store.measure(entry, event)

    events.changed = changed
    record = record_of(request)
    entry.task = answer_in_background(context, record, ready.job, events, entry.gone, sent)
    entry.task.add_done_callback(lambda _: entry.moved.set())
    return _followed(entry, 0) if is_streamed else _object(entry)


async def _fitting(context: Context, chat: ChatBody, name_of: NameOf, cuts: bool) -> Ready:
    """The turn of a conversation, without its earliest turns where it is too long and they may go.

    An answer keeps the room that it asks for, of half the model's length. Raises ApiError.
    """
    most = context.config.engine.max_length
    room = min(chat.max_tokens, most // 2) if isinstance(chat.max_tokens, int) else 1

    async def tried(messages: Sequence[Any]) -> Ready | ApiError:
        try:
            ready = await ready_turn(
                context, chat.model_copy(update={"messages": list(messages)}), name_of
            )
        except ApiError as error:
            if not cuts or error.code != "context_length_exceeded":
                raise
            return error
        length = len(ready.job.prompts[0])
        if not cuts or length + room <= most:
            return ready
        return invalid(
            "input",
            f"input has {length} tokens, and less than {room} of {most} are left for an answer; "
            "shorten it, or ask for fewer tokens",
            "context_length_exceeded",
        )

    messages = chat.messages
    found = await tried(messages)
    if isinstance(found, Ready):
        return found
    roles = [message.role for message in messages]
    num_kept = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), 0)
    starts = [index for index, role in enumerate(roles) if role == "user" and index > num_kept]
    low, high = 0, len(starts)  # the first start that fits lies between
    best: Ready | ApiError = found
    while low < high:
        middle = (low + high) // 2
        found = await tried([*messages[:num_kept], *messages[starts[middle] :]])
        if isinstance(found, Ready):
            best, high = found, middle
        else:
            low = middle + 1
    if isinstance(best, ApiError):
        raise best
    return best


def _found(context: Context, request: Request, response_id: str) -> Entry:
    return context.store.find(record_of(request).key.digest, response_id)


def _object(entry: Entry) -> Response:
    return Response(entry.response, media_type="application/json")


def _followed(entry: Entry, first: int) -> Response:
    """The stream of a background response. Raises ApiError 400 where there is none."""
    if entry.events is None:
        raise invalid(
            "stream", f"{entry.id} was not created with background and stream true; leave it out"
        )
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return _Followed(entry.follow(first), media_type=ResponseEvents.media_type, headers=headers)


def _flag(request: Request, name: str) -> bool:
    given = request.query_params.get(name, "false")
    if given not in ("true", "false"):
        raise invalid(name, f"{name} is {given[:80]!r} (allowed: true, false)")
    return given == "true"


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    given = request.query_params.get(name)
    if given is None:
        return default
    is_number = given.isascii() and given.isdigit() and len(given) < 17
    if not is_number or not least <= int(given) <= most:
        raise invalid(name, f"{name} is {given[:80]!r} (allowed: {least} to {most})")
    return int(given)
