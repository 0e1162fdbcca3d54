"""The Messages API: its bodies, as conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from predict.server.answer_blocks import unsealed
from predict.server.answers import to_json
from predict.server.errors import invalid
from predict.server.protocol import (
    MAX_MESSAGES,
    Body,
    ChatBody,
    FirstOnly,
    FullName,
    FunctionCall,
    Integer,
    JsonSchemaFormat,
    ModelName,
    NumberField,
    Object,
    ResponseFormat,
    Schema,
    Texts,
    ToolCall,
    TypedBody,
    by_kind,
    tagged,
    text_or_list,
    type_of,
    whole,
)
from predict.server.turns import Conversation, NameOf, Place, function_tool, thinking
from predict.text.conversation import text_part

MIN_BUDGET = 1024  # tokens of thoughts
_CACHE = frozenset({"cache_control"})  # the prefix cache takes every prompt


class TextBlock(TypedBody):
    """A text."""

    type: Literal["text"]
    text: str
    ignored: ClassVar[frozenset[str]] = _CACHE | {"citations"}


class ImageSource(Body):
    """Where a picture is: in the body, or behind an address."""

    type: Literal["base64", "url"]
    media_type: Annotated[str, Field(max_length=64)] | None = None
    data: str | None = None
    url: str | None = None


class ImageBlock(Body):
    """A picture."""

    type: Literal["image"]
    source: ImageSource
    ignored: ClassVar[frozenset[str]] = _CACHE


class ThinkingBlock(Body):
    """A thought of an earlier answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""
    ignored: ClassVar[frozenset[str]] = _CACHE


class ToolUseBlock(Body):
    """A call of an earlier answer."""

    type: Literal["tool_use"]
    id: FullName
    name: FullName
    input: dict[str, Any]
    ignored: ClassVar[frozenset[str]] = _CACHE | {"caller"}


Texted = Annotated[
    Annotated[str, tagged("text")]
    | Annotated[list[TextBlock], FirstOnly(), Field(max_length=MAX_MESSAGES), tagged("list")],
    text_or_list("a text, a list of text blocks"),
]
Shown = Annotated[
    Annotated[TextBlock, tagged("text")] | Annotated[ImageBlock, tagged("image")],
    by_kind("text, image", type_of),
]
Result = Annotated[
    Annotated[str, tagged("text")]
    | Annotated[list[Shown], FirstOnly(), Field(max_length=MAX_MESSAGES), tagged("list")],
    text_or_list("a text, a list of text and image blocks"),
]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: FullName
    content: Result | None = None
    is_error: bool | None = None
    ignored: ClassVar[frozenset[str]] = _CACHE


Block = Annotated[
    Annotated[TextBlock, tagged("text")]
    | Annotated[ImageBlock, tagged("image")]
    | Annotated[ThinkingBlock, tagged("thinking")]
    | Annotated[ToolUseBlock, tagged("tool_use")]
    | Annotated[ToolResultBlock, tagged("tool_result")],
    by_kind("text, image, thinking, tool_use, tool_result", type_of),
]
BlockList = Annotated[list[Block], FirstOnly(), Field(min_length=1, max_length=MAX_MESSAGES)]
Blocks = Annotated[
    Annotated[str, tagged("text")] | Annotated[BlockList, tagged("list")],
    text_or_list("a text, a list of blocks"),
]


class MessageTurn(Body):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class ClientTool(TypedBody):
    """A function that the model may call."""

    type: Literal["custom", None] = None
    name: FullName
    description: str | None = None
    input_schema: Object = None  # a JSON schema of its arguments
    strict: bool | None = None

    ignored: ClassVar[frozenset[str]] = _CACHE | {"eager_input_streaming", "input_examples"}
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "defer_loading": ((False,), "the model is told of all tools"),
        "allowed_callers": ((["direct"],), "the model alone calls"),
    }


class ToolSelection(Body):
    """Which tools the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: FullName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(Body):
    """Whether the model thinks."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Integer = None  # a wish: max_tokens bounds thoughts too
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(TypedBody):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Schema = Field(default=None, alias="schema")


class OutputConfig(Body):
    """How much the model does, and the form of its answer."""

    effort: Annotated[str, Field(max_length=32)] | None = None
    format: OutputFormat | None = None


class ContextEdit(TypedBody):
    """What is taken out of the conversation: thoughts, which the chat template sees to."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] = "all"


class ContextManagement(Body):
    """What is taken out of the conversation."""

    edits: Annotated[list[ContextEdit], FirstOnly()] | None = None


class CountBody(Body):
    """A conversation whose tokens are counted."""

    model: ModelName | None = None
    messages: Annotated[
        list[MessageTurn], FirstOnly(), Field(min_length=1, max_length=MAX_MESSAGES)
    ]
    system: Texted | None = None
    tools: Annotated[list[ClientTool], FirstOnly()] | None = None
    tool_choice: ToolSelection | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None

    ignored: ClassVar[frozenset[str]] = _CACHE | {"metadata", "service_tier", "inference_geo"}
    refused: ClassVar[Mapping[str, tuple[tuple[Any, ...], str]]] = {
        "container": ((), "this server runs nothing for a model"),
        "mcp_servers": (([],), "this server calls no others; give tools"),
        "diagnostics": ((), "usage says what the cache had"),
        "speed": (("standard",), "there is one speed"),
        "output_format": ((), "write it into output_config.format"),
        "n": ((1,), "an answer is one message"),
    }


class MessagesBody(CountBody):
    """A request for the next message of a conversation."""

    max_tokens: Annotated[int, BeforeValidator(whole)]
    stream: bool | None = None
    stop_sequences: Texts = None
    temperature: NumberField = None
    top_p: NumberField = None
    top_k: Integer = None


_NAMES: Mapping[str, str] = {
    r"^stop$": "stop_sequences",
    r"^reasoning_effort$": "output_config.effort",
    r"^response_format\.json_schema": "output_config.format",
    r"^(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
    r"^(tools\[\d+\])\.function$": r"\1.name",
}


def asked(body: CountBody) -> tuple[ChatBody, NameOf]:
    """The conversation of a body, and the names of its fields. Raises ApiError 400."""
    made = Conversation(_NAMES)
    if body.system:
        made.add(Place("system", "system"), "system", _texts(body.system))
    for index, turn in enumerate(body.messages):
        _add(made, turn, f"messages[{index}]")
    if body.messages[-1].role == "assistant":
        where = f"messages[{len(body.messages) - 1}].role"
        raise invalid(
            where,
            f"{where} of the last message is 'assistant' (allowed: user): an answer is a turn of "
            "its own, and goes on with no message",
        )
    config = body.output_config or OutputConfig()
    choice = body.tool_choice
    given = body if isinstance(body, MessagesBody) else None
    chat = ChatBody.model_construct(
        model=body.model,
        messages=made.messages,
        max_tokens=given and given.max_tokens,
        stop=given and given.stop_sequences,
        temperature=given and given.temperature,
        top_p=given and given.top_p,
        top_k=given and given.top_k,
        response_format=_form(config),
        tools=[
            function_tool(tool.name, tool.description, tool.input_schema, tool.strict)
            for tool in body.tools or ()
        ],
        tool_choice=_choice(choice),
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        reasoning_effort=config.effort,
        chat_template_kwargs=_thinking(body.thinking),
    )
    return chat, lambda param: made.name_of(param).replace(".image_url", ".source")


def _add(made: Conversation, turn: MessageTurn, where: str) -> None:
    """Adds the messages of a turn: results and what is said beside them each have their own."""
    if isinstance(turn.content, str):
        made.add(Place(where, f"{where}.content"), turn.role, turn.content)
        return
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []

    def say() -> None:
        more: dict[str, Any] = {}
        if thoughts:
            more["reasoning_content"] = "".join(thoughts)
        if calls:
            more["tool_calls"] = [*calls]
        if texts or more:
            content = None if more and not texts else _joined(texts)
            made.add(Place(where, f"{where}.content"), turn.role, content, **more)
        texts.clear()
        thoughts.clear()
        calls.clear()

    for index, block in enumerate(turn.content):
        place = f"{where}.content[{index}]"
        roles = _ROLES[block.type]
        if turn.role not in roles:
            raise invalid(
                f"{place}.type",
                f"{place}.type is {block.type!r} in a message of the role {turn.role!r} (allowed: "
                f"in those of {', '.join(roles)})",
            )
        if isinstance(block, TextBlock):
            texts.append(block.text)
        elif isinstance(block, ImageBlock):
            texts.append(_picture(block, place))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking or unsealed(block.signature) or "")
        elif isinstance(block, ToolUseBlock):
            function = FunctionCall(name=block.name, arguments=to_json(block.input).decode())
            calls.append(ToolCall(id=block.id, function=function))
            made.call_ids.add(block.id)
        else:
            say()
            head, at = "Error: " if block.is_error else "", Place(place, f"{place}.content")
            content = _texts(block.content or "", head, at.content)
            made.add_result(at, content, "tool_use_id", block.tool_use_id)
    say()


def _texts(content: str | Sequence[Any], head: str = "", where: str = "") -> Any:
    """A content as chat has it, behind the head. where: it is in the body."""
    parts: list[Any] = [content] if isinstance(content, str) else []
    for index, block in enumerate(() if parts else content):
        is_text = isinstance(block, TextBlock)
        parts.append(block.text if is_text else _picture(block, f"{where}[{index}]"))
    return _joined([head, *parts] if head else parts)


def _joined(parts: list[Any]) -> Any:
    """Texts, and parts of chat, as a content."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [text_part(part) if isinstance(part, str) else part for part in parts]


def _picture(block: ImageBlock, where: str) -> dict[str, Any]:
    """A picture as chat has it. Raises ApiError 400."""
    source = block.source
    wanted = {"base64": ("data", "media_type"), "url": ("url",)}[source.type]
    for name in ("data", "media_type", "url"):
        if (getattr(source, name) is None) == (name in wanted):
            said = "is missing" if name in wanted else "is given"
            raise invalid(
                f"{where}.source.{name}",
                f"{where}.source.{name} {said} (allowed with type {source.type!r}: "
                f"{', '.join(wanted)})",
            )
    url = source.url or f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


_ROLES: Mapping[str, tuple[str, ...]] = {
    "text": ("user", "assistant", "system"),
    "image": ("user",),
    "thinking": ("assistant",),
    "tool_use": ("assistant",),
    "tool_result": ("user",),
}


def _form(config: OutputConfig) -> ResponseFormat | None:
    if config.format is None:
        return None
    schema = JsonSchemaFormat.model_construct(schema_=config.format.schema_)
    return ResponseFormat(type="json_schema", json_schema=schema)


def _choice(choice: ToolSelection | None) -> Any:
    """A choice of tools as chat has it. Raises ApiError 400."""
    if choice is None:
        return None
    if (choice.type == "tool") != (choice.name is not None):
        raise invalid(
            "tool_choice.name",
            f"tool_choice.name {_said(choice.name, 'tool')}; this type is {choice.type!r}",
        )
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.type == "any" else choice.type


def _thinking(config: ThinkingConfig | None) -> dict[str, bool] | None:
    """The values for the chat template. Raises ApiError 400."""
    if config is None:
        return None
    budget, name = config.budget_tokens, "thinking.budget_tokens"
    if (config.type == "enabled") != (budget is not None):
        raise invalid(name, f"{name} {_said(budget, 'enabled')}; this type is {config.type!r}")
    if budget is not None and (type(budget) is not int or budget < MIN_BUDGET):
        got = str(budget)[:40]
        raise invalid(name, f"{name} is {got} (allowed: a whole number from {MIN_BUDGET} on)")
    return thinking(config.type != "disabled")


def _said(value: Any, kind: str) -> str:
    """What is wrong with a field that goes with one type, and is not where it must be."""
    return (
        f"is missing: the type {kind!r} needs it" if value is None else f"goes with {kind!r} alone"
    )
