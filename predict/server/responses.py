"""The Responses API: its bodies, as conversations."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from predict.server.answer_blocks import unsealed
from predict.server.protocol import (
    MAX_MESSAGES,
    Body,
    ChatBody,
    ChatMessage,
    Content,
    FirstOnly,
    FullName,
    FunctionCall,
    Integer,
    JsonSchemaFormat,
    ModelName,
    Name,
    NumberField,
    Object,
    ResponseFormat,
    Schema,
    ToolCall,
    ToolChoice,
    TypedBody,
    by_kind,
    tagged,
    text_or_list,
    type_of,
)
from predict.server.turns import Conversation, NameOf, Place, function_tool, thinking
from predict.text.conversation import text_part

MAX_ITEMS = 4 * MAX_MESSAGES  # a turn may be a thought, a text, a call and its result
MAX_METADATA = 16
SEALED = "reasoning.encrypted_content"
_PREFIX = {"function_call": "fc", "message": "msg", "reasoning": "rs"}


class MessageItem(Body):
    """What somebody has said."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content = None

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "phase"})


class CallItem(Body):
    """A call of an earlier answer."""

    type: Literal["function_call"]
    call_id: FullName
    name: FullName
    arguments: str

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "created_by", "caller"})
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "namespace": ((), "functions have names alone"),
    }


class OutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: FullName
    output: Content = None

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status", "name", "caller"})


class ThoughtPart(Body):
    """A part of a thought."""

    type: Literal["reasoning_text", "summary_text", "text"]
    text: str


Parts = Annotated[list[ThoughtPart], FirstOnly(), Field(max_length=MAX_MESSAGES)]


class ThoughtItem(Body):
    """A thought of an earlier answer."""

    type: Literal["reasoning"]
    summary: Parts | None = None
    content: Parts | None = None
    encrypted_content: str | None = None

    ignored: ClassVar[frozenset[str]] = frozenset({"id", "status"})


def _kind_of(value: Any) -> str | None:
    is_message = isinstance(value, dict) and "type" not in value and "role" in value
    return "message" if is_message else type_of(value)


Item = Annotated[
    Annotated[MessageItem, tagged("message")]
    | Annotated[CallItem, tagged("function_call")]
    | Annotated[OutputItem, tagged("function_call_output")]
    | Annotated[ThoughtItem, tagged("reasoning")],
    by_kind("message, function_call, function_call_output, reasoning", _kind_of),
]
Items = Annotated[list[Item], FirstOnly(), Field(min_length=1, max_length=MAX_ITEMS)]
Input = Annotated[
    Annotated[str, tagged("text")] | Annotated[Items, tagged("list")],
    text_or_list("a text, a list of items"),
]


class FunctionItem(TypedBody):
    """A function that the model may call."""

    type: Literal["function"]
    name: FullName
    description: str | None = None
    parameters: Object = None  # a JSON schema of its arguments
    strict: bool | None = None

    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "async": ((False,), "an answer waits for its calls"),
        "defer_loading": ((False,), "the model is told of all tools"),
        "allowed_callers": ((["direct"],), "the model alone calls"),
        "output_schema": ((), "results are texts"),
    }


class TextFormat(TypedBody):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: Schema = Field(default=None, alias="schema")
    strict: bool | None = None


class TextConfig(Body):
    """How the answer is written."""

    format: TextFormat | None = None
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "verbosity": (("medium",), "no model of this server knows it"),
    }


_WHOLE = (("auto",), "thoughts come whole, as the content of items")


class ReasoningConfig(Body):
    """How the model thinks."""

    effort: Annotated[str, Field(max_length=32)] | None = None  # none: it does not
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "summary": _WHOLE,
        "generate_summary": _WHOLE,
        "context": (("auto",), "the chat template says which thoughts stay"),
        "mode": (("standard",), "there is one mode"),
    }


class ResponseStreamOptions(Body):
    """Options of a stream."""

    ignored: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})


class ResponsesBody(Body):
    """A request for the next turn of a conversation of items."""

    model: ModelName | None = None
    input: Input
    instructions: str | None = None
    previous_response_id: Name | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    background: bool | None = None
    max_output_tokens: Integer = None
    temperature: NumberField = None
    top_p: NumberField = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[FunctionItem], FirstOnly()] | None = None
    tool_choice: ToolChoice = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], FirstOnly()] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("user", "service_tier", "safety_identifier", "client_metadata", "max_tool_calls"),
            *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        }
    )
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "conversation": ((), "use previous_response_id, or send its items"),
        "prompt": ((), "write the prompt into input"),
        "context_management": (([],), "use truncation"),
        "moderation": ((), "no model of this server moderates"),
        "background_options": ((), "an answer begins as soon as it can"),
        "top_logprobs": ((0,), "/v1/chat/completions has logprobs"),
        "image": ((), "this model reads text only"),
    }


_NAMES: Mapping[str, str] = {
    r"^messages$": "input",
    r"^max_tokens$": "max_output_tokens",
    r"^reasoning_effort$": "reasoning.effort",
    r"^response_format\.json_schema": "text.format",
    r"^response_format": "text.format",
    r"^(tools\[\d+\])\.function\.parameters": r"\1.parameters",
    r"^(tools\[\d+\])\.function$": r"\1.name",
}


def asked(body: ResponsesBody, earlier: Sequence[Any] = ()) -> tuple[ChatBody, NameOf]:
    """The conversation of a body, and the names of its fields. Raises ApiError 400.

    earlier: items ahead of its own.
    """
    made = Conversation(_NAMES)
    if body.instructions:
        made.add(Place("instructions", "instructions"), "system", body.instructions)
    last: ChatMessage | None = None  # of the assistant, while it may have more
    for index, item in enumerate([*earlier, *own_items(body)], -len(earlier)):
        where = "previous_response_id" if index < 0 else f"input[{index}]"
        place = Place(where, f"{where}.content")
        if index >= 0 and isinstance(body.input, str):
            place = Place("input", "input")
        if isinstance(item, OutputItem):
            place = Place(where, f"{where}.output")
            made.add_result(place, item.output, "call_id", item.call_id)
            last = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            made.add(place, item.role, item.content)
            last = None
        else:
            if last is None or _is_next(last, item):
                last = made.add(place, "assistant", None)
            elif isinstance(item, MessageItem):
                made.places[-1] = place
            if isinstance(item, CallItem):
                made.call_ids.add(item.call_id)
            _join(last, item)
    effort = None if body.reasoning is None else body.reasoning.effort
    chat = ChatBody.model_construct(
        model=body.model,
        messages=made.messages,
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        response_format=_form(body),
        tools=[
            function_tool(tool.name, tool.description, tool.parameters, tool.strict)
            for tool in body.tools or ()
        ],
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=None if effort == "none" else effort,
        chat_template_kwargs=thinking(effort != "none") if effort is not None else None,
    )
    return chat, made.name_of


def own_items(body: ResponsesBody) -> list[Any]:
    """The items of a body."""
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return body.input


def kept_item(item: Body) -> dict[str, Any]:
    """An item as it is stored and shown."""
    fields = item.model_dump(exclude_none=True)
    prefix = _PREFIX.get(fields["type"], "fco")
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        fields["content"] = [{"type": kind, "text": item.content}]
    for part in fields.get("content") or () if fields.get("role") == "assistant" else ():
        if isinstance(part, dict):
            part.setdefault("annotations", [])
    if isinstance(item, ThoughtItem):
        fields.setdefault("summary", [])
    return {"id": new_id(prefix), **fields, "status": "completed"}


def new_id(prefix: str) -> str:
    """A fresh id of a response or an item."""
    return f"{prefix}_{secrets.token_hex(24)}"


def _is_next(message: ChatMessage, item: Any) -> bool:
    """Whether a part of an answer begins a message of its own.

    A text behind calls that have no results yet is of their answer.
    """
    if isinstance(item, CallItem) or (isinstance(item, MessageItem) and message.tool_calls):
        return False
    has_more = message.content is not None or bool(message.tool_calls)
    return has_more or isinstance(item, ThoughtItem)


def _join(message: ChatMessage, item: Any) -> None:
    """Adds a part of an answer to the assistant's message that it belongs to."""
    if isinstance(item, MessageItem):
        message.content = _joined(message.content, item.content)
    elif isinstance(item, CallItem):
        function = FunctionCall(name=item.name, arguments=item.arguments)
        if message.tool_calls is None:
            message.tool_calls = []
        message.tool_calls.append(ToolCall(id=item.call_id, function=function))
    else:
        message.reasoning_content = _thought(item)


def _joined(content: Any, more: Any) -> Any:
    """A content with more behind it. Neither has been checked."""
    if content is None:
        return more
    parts: list[Any] = []
    for each in (content, more):
        parts += each if isinstance(each, list) else [text_part(each)]
    return parts


def _thought(item: ThoughtItem) -> str:
    if item.content:
        return "".join(part.text for part in item.content)
    kept = unsealed(item.encrypted_content or "")
    return "".join(part.text for part in item.summary or ()) if kept is None else kept


def _form(body: ResponsesBody) -> ResponseFormat | None:
    given = None if body.text is None else body.text.format
    if given is None:
        return None
    schema = None
    if given.type == "json_schema":
        schema = JsonSchemaFormat.model_construct(schema_=given.schema_, strict=given.strict)
    return ResponseFormat(type=given.type, json_schema=schema)


def _choice(choice: Any) -> Any:
    """A choice of a tool as chat has it."""
    if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice
