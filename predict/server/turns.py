"""The one inner form of a conversation: what every door asks, and what it takes to answer it.

A door translates its body into a ChatBody, and names the fields of that by its own ones in errors.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from predict.answer_form import AnswerForm
from predict.engine.retrieval import no_text
from predict.errors import UserError
from predict.images.placed import Pictures
from predict.server.asked import asked_of, conversation, form_of, template_values
from predict.server.context import Context
from predict.server.errors import ApiError, invalid
from predict.server.model_text import tools_for_template
from predict.server.pictures import Found
from predict.server.protocol import ChatBody, ChatMessage, FunctionTool, ToolBody
from predict.server.runs import Job
from predict.text.deltas import Reader
from predict.text.tool_calls import ToolUse, template_messages

NO_TOOLS = ToolUse()
NameOf = Callable[[str], str]  # field of a ChatBody -> field of a door's body


class Turn(NamedTuple):
    """A prompt, and what its answer may call."""

    prompt: str
    token_ids: list[int]
    use: ToolUse
    pictures: Pictures | None = None  # whose tokens the prompt has


class Ready(NamedTuple):
    """A turn that the engine can answer."""

    model: str  # as answers have it
    job: Job
    make_reader: Callable[[], Reader | None]  # of one answer; None where all text is content


class Place(NamedTuple):
    """Where a message of a conversation stands in a body, and its content."""

    message: str
    content: str


class Conversation:
    """The messages that a door's parts become, and where each came from."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """names: the door's names of other fields, by patterns of a ChatBody's."""
        self._names = names
        self.messages: list[ChatMessage] = []
        self.places: list[Place] = []
        self.call_ids: set[str] = set()  # of the calls so far

    def add(self, place: Place, role: Any, content: Any, **more: Any) -> ChatMessage:
        """Adds a message, whose fields the door has checked within its own bounds."""
        self.messages.append(ChatMessage.model_construct(role=role, content=content, **more))
        self.places.append(place)
        return self.messages[-1]

    def add_result(self, place: Place, content: Any, name: str, call_id: str) -> None:
        """Adds the result of a call. name: of the id. Raises ApiError 400 for an unknown one."""
        param = f"{place.message}.{name}"
        if call_id not in self.call_ids:
            raise invalid(
                param,
                f"{param} is {call_id[:80]!r}, and no call ahead has that id; send the call too",
            )
        self.add(place, "tool", content, tool_call_id=call_id)

    def name_of(self, param: str) -> str:
        """A field of the conversation as the door has it."""
        found = re.fullmatch(r"messages\[(\d+)\](\.content)?(.*)", param)
        if found is not None and int(found[1]) < len(self.places):
            place = self.places[int(found[1])]
            return (place.content if found[2] else place.message) + found[3]
        for pattern, name in self._names.items():
            named, count = re.subn(pattern, name, param, count=1)
            if count:
                return named
        return param


def function_tool(
    name: str, description: str | None, parameters: Any, strict: bool | None
) -> ToolBody:
    """A function that the model may call."""
    return ToolBody(
        function=FunctionTool(
            name=name, description=description, parameters=parameters, strict=strict
        )
    )


def thinking(is_on: bool) -> dict[str, bool]:
    """The values by which chat templates turn thoughts on and off."""
    return {"enable_thinking": is_on, "thinking": is_on}


async def turn_of(
    context: Context,
    messages: Sequence[ChatMessage],
    values: Mapping[str, Any],
    tools: Sequence[ToolBody] | None = None,
    use: ToolUse = NO_TOOLS,
) -> Turn:
    """The prompt of a conversation. values: what else the template takes. Raises ApiError 400."""
    if not context.info().makes_text:  # most such models have no template, which says less
        raise invalid("model", no_text(context.info().model_type))
    most = context.config.max_schema_bytes
    shown = tools_for_template(tools or ())
    size = len(json.dumps(shown).encode())
    if tools and size > most:
        raise invalid("tools", f"tools have {size} bytes as JSON (allowed: {most})")
    found: Found | None = None if context.front.pictures is None else []
    turns = conversation(messages, found=found)
    if context.front.template is not None:
        turns = template_messages(turns, context.front.template.source)
    # A model that may call nothing is not told of tools.
    prompt = await context.front.render(turns, shown if use.allowed else None, values)
    token_ids = await context.front.encode(prompt, "messages", False)
    token_ids, pictures = await context.front.see(token_ids, found or ())
    return Turn(prompt, token_ids, use, pictures)


async def num_prompt_tokens(context: Context, body: ChatBody, name_of: NameOf) -> int:
    """Tokens of a conversation's prompt. Raises as `ready_turn`."""
    with _told_as(name_of):
        context.models.find(body.model)
        return len((await _rendered(context, body)).token_ids)


async def ready_turn(
    context: Context, body: ChatBody, name_of: NameOf = str, *, tells_stops: bool = False
) -> Ready:
    """The turn that a conversation asks for. Raises ApiError 400, 404.

    name_of: names the fields in errors, the engine's among them. tells_stops: readers know which
    stop string has ended an answer.
    """
    texts = context.model_text
    with _told_as(name_of):
        model = context.models.find(body.model)
        given = form_of(body, context.config)
        # What is wrong is told before anything is rendered.
        asked = asked_of(body, context.config, {"adapter": model.adapter, **_logprobs(body)}, given)
        turn = await _rendered(context, body)
        form = texts.answer_form(turn.use, turn.prompt)
        if form is None and tells_stops and body.stop:
            form = AnswerForm()
        guide = texts.form(given, turn.use, turn.prompt)
        asked = asked.behind(guide, form)

    def make_reader() -> Reader | None:
        return texts.reader(turn.use, turn.prompt, turn.token_ids, asked.params)

    def refused(error: UserError) -> ApiError:
        return _renamed(asked.refused(error), name_of)

    job = Job([turn.token_ids], asked.params, refused, pictures=turn.pictures)
    return Ready(model.name, job, make_reader)


async def _rendered(context: Context, body: ChatBody) -> Turn:
    use = context.model_text.use_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    values = template_values(body.chat_template_kwargs, body.reasoning_effort)
    return await turn_of(context, body.messages, values, body.tools, use)


def _logprobs(body: ChatBody) -> dict[str, Any]:
    """The field of SamplingParams that a chat's two fields stand for. Raises ApiError 400."""
    if body.logprobs:
        return {"logprobs": 0 if body.top_logprobs is None else body.top_logprobs}
    if body.top_logprobs is not None and body.top_logprobs != 0:
        raise invalid("top_logprobs", "top_logprobs needs logprobs; set logprobs to true")
    return {}


def _renamed(error: ApiError, name_of: NameOf) -> ApiError:
    """The error with its field named as a door's clients know it."""
    if error.param is not None:
        named = name_of(error.param)
        if error.message.startswith(error.param):
            error.message = named + error.message[len(error.param) :]
        error.param = named
    return error


@contextlib.contextmanager
def _told_as(name_of: NameOf) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        _renamed(error, name_of)
        raise
