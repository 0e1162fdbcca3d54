"""A request's fields as SamplingParams, as a Guide, and as a conversation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from predict.answer_form import AnswerForm
from predict.config.engine import check_params
from predict.errors import UserError, quoted
from predict.guide import Guide
from predict.request import SAMPLING_KEYS, SamplingParams
from predict.server.config import ServerConfig
from predict.server.errors import ApiError, invalid, refused
from predict.server.key_file import Key
from predict.server.pictures import Found, asked_picture
from predict.server.protocol import (
    ChatMessage,
    GenerationBody,
    ResponseFormat,
    StructuredOutputs,
)
from predict.system.files import json_type
from predict.text.conversation import TEXT_PARTS, Message, Part, is_picture_part, text_part

# The names that requests have for fields of SamplingParams, where they differ.
_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "max_new_tokens": ("max_tokens", "max_completion_tokens", "max_new_tokens"),
    "min_length": ("min_length", "min_tokens"),
}
_NUMBER = re.compile(r"-?[0-9]{1,20}", re.ASCII)
_GUIDE = re.compile(r"guide\b(\.\w+)?")  # at the beginning of an error about one
_ELSEWHERE = ("adapter", "answer_form", "guide", "logprobs")  # fields that routes set
# Kinds of a Guide by vLLM's names: of guided_NAME, and of structured_outputs' fields.
_GUIDE_KINDS: Mapping[str, str] = {
    "json": "json_schema",
    **{kind: kind for kind in ("json_object", "regex", "choice", "grammar", "structural_tag")},
}
MAX_PARTS = 1024  # of a message's content
MAX_TEMPLATE_VALUES = 64
# Names that the server alone sets in a template.
_TEMPLATE_NAMES = ("messages", "tools", "documents", "add_generation_prompt")


class Asked(NamedTuple):
    """The parameters of a request, and the names of its fields."""

    params: SamplingParams
    names: Mapping[str, str]  # field of SamplingParams -> field of the request

    def behind(self, form: Form | None, answer_form: AnswerForm | None) -> Asked:
        """With what the prompt decides: a guide, and how the answer is read. Raises ApiError."""
        guide, param = (None, "guide") if form is None else form
        if (guide, answer_form) == (self.params.guide, self.params.answer_form):
            return self
        names = {**self.names, "guide": param}
        try:
            return Asked(replace(self.params, guide=guide, answer_form=answer_form), names)
        except UserError as error:
            raise refused(error, names) from None

    def refused(self, error: UserError) -> ApiError:
        """The engine's refusal as an error that names the request's field."""
        message = str(error)
        if _GUIDE.match(message):
            param = self.names["guide"]
            return invalid(param, _GUIDE.sub(lambda _: param, message, count=1))
        return refused(error, self.names)


def known_fields() -> dict[str, str]:
    """Field of SamplingParams -> field of a request, where a body has no other name for it."""
    return {**{field: field for field in SAMPLING_KEYS}, "adapter": "model"}


def given_params(body: GenerationBody) -> tuple[dict[str, Any], dict[str, str]]:
    """A body's values by field of SamplingParams, and its names of these fields.

    Raises ApiError 400 where two names of a field have different values.
    """
    given: dict[str, Any] = {}
    names: dict[str, str] = {}
    for field in SAMPLING_KEYS:
        if field in _ELSEWHERE:
            continue
        for name in _SPELLINGS.get(field, (field,)):
            value = getattr(body, name, None)
            if value is None:
                continue
            if field in given and given[field] != value:
                raise invalid(
                    name,
                    f"{name} {quoted(value)} and {names[field]} {quoted(given[field])} mean the "
                    "same; leave one of them out",
                )
            given[field], names[field] = value, name
    return given, names


def asked_priority(header: str | None) -> int | None:
    """The priority of a request's X-Priority; None without one. Raises ApiError 400."""
    if header is None:
        return None
    if not _NUMBER.fullmatch(header.strip()):
        raise invalid("X-Priority", f"X-Priority is {quoted(header[:80])} (allowed: an integer)")
    try:
        return SamplingParams(priority=int(header)).priority
    except UserError as error:
        raise invalid("X-Priority", str(error).replace("priority", "X-Priority", 1)) from None


def ranked(params: SamplingParams, header: int | None, key: Key) -> SamplingParams:
    """With the priority of a request: of its header, else of its body, within what its key may ask.

    Raises ApiError 400.
    """
    wanted = params.priority if header is None else header
    least = key.min_priority
    if least is not None and wanted < least:
        if header is not None or wanted:
            raise invalid(
                "priority" if header is None else "X-Priority",
                f"priority is {wanted}, and this API key asks for {least} and more; raise it",
            )
        wanted = least  # nobody asked
    return params if wanted == params.priority else replace(params, priority=wanted)


class Form(NamedTuple):
    """The guide of an answer, and the request's field that it comes from."""

    guide: Guide
    param: str


def asked_of(
    body: GenerationBody, config: ServerConfig, extra: Mapping[str, Any], form: Form | None
) -> Asked:
    """A body's checked parameters. extra: fields that the route has set. Raises ApiError."""
    given, names = given_params(body)
    if isinstance(given.get("stop"), list) and len(given["stop"]) > config.max_stop:
        raise invalid(
            "stop", f"stop has {len(given['stop'])} texts (allowed: at most {config.max_stop})"
        )
    guide, param = (None, "guide") if form is None else form
    known = {**known_fields(), **names, "guide": param}
    try:
        params = config.params({**given, **extra, "guide": guide})
        check_params(params, config.engine)
    except UserError as error:
        raise refused(error, known) from None
    for name in ("n", "best_of", "num_beams"):
        count = getattr(params, name) or 1
        if count > config.max_answers:
            raise invalid(name, f"{name} is {count} (allowed: at most {config.max_answers})")
    if body.stream and params.num_samples > params.n:
        raise invalid(
            "best_of",
            "best_of chooses among finished answers, which cannot be streamed; leave out best_of "
            "or stream",
        )
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "stream_options needs stream; set stream to true")
    return Asked(params, known)


def form_of(body: GenerationBody, config: ServerConfig) -> Form | None:
    """The guide of a body; None without one. Raises ApiError 400 that names the field."""
    found = list(_guides(body))
    if not found:
        return None
    if len(found) > 1:
        first, second = found[0][0], found[1][0]
        raise invalid(second, f"{first} and {second} both say what the answer is; leave one out")
    param, value = found[0]
    try:
        guide = Guide.of(value)
    except UserError as error:
        kind = next(iter(value), "") if isinstance(value, dict) else ""
        raise invalid(param, str(error).replace(f"guide.{kind}", param, 1)) from None
    size = len(guide.text.encode())
    if size > config.max_schema_bytes:
        raise invalid(
            param, f"{param} has {size} bytes (allowed: at most {config.max_schema_bytes})"
        )
    return Form(guide, param)


def _guides(body: GenerationBody) -> Iterator[tuple[str, Any]]:
    """The (field of the request, value for Guide.of) of each guide that is given."""
    if body.guide is not None:
        yield "guide", body.guide
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_structured(body.structured_outputs)
    for name, kind in _GUIDE_KINDS.items():
        value = getattr(body, f"guided_{name}", None)
        if value is not None:
            yield f"guided_{name}", {kind: value}


def _of_response_format(form: ResponseFormat) -> Iterator[tuple[str, Any]]:
    if form.type == "json_object":
        yield "response_format", {"json_object": True}
    elif form.type == "json_schema":
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise invalid(
                "response_format.json_schema.schema",
                "response_format.json_schema.schema is missing; write the schema, or "
                'response_format {"type": "json_object"}',
                "missing_field",
            )
        schema = {"json_schema": form.json_schema.schema_}
        if form.json_schema.strict:
            schema["strict"] = True
        yield "response_format.json_schema.schema", schema
    elif form.type == "structural_tag":
        names = ("structures", "triggers", "at_least_one", "stop_after_first")
        tag = {name: getattr(form, name) for name in names}
        given = {name: value for name, value in tag.items() if value is not None}
        yield "response_format", {"structural_tag": given}


def _of_structured(form: StructuredOutputs) -> Iterator[tuple[str, Any]]:
    if form.json_object is not None and not isinstance(form.json_object, bool):
        raise invalid(
            "structured_outputs.json_object",
            f"structured_outputs.json_object is {json_type(form.json_object)} (allowed: true, "
            "false)",
        )
    for name, kind in _GUIDE_KINDS.items():
        value = getattr(form, "json_" if name == "json" else name)
        if value is not None and value is not False:
            yield f"structured_outputs.{name}", {kind: value}


def conversation(
    messages: Sequence[ChatMessage], where: str = "messages", found: Found | None = None
) -> list[Message]:
    """Role messages of texts or parts. Raises ApiError 400 that names the field.

    found: where there may be pictures: those are added.
    """
    return [_message(each, f"{where}[{index}]", found) for index, each in enumerate(messages)]


def _message(message: ChatMessage, where: str, found: Found | None) -> Message:
    role = "system" if message.role == "developer" else message.role
    fields: Message = {"role": role, "content": _content(message, where, found)}
    for name in ("name", "tool_call_id", "reasoning_content", "reasoning"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.tool_calls:
        if role != "assistant":
            raise invalid(
                f"{where}.tool_calls", f"{where}.tool_calls stand in an assistant's message alone"
            )
        fields["tool_calls"] = [call.model_dump(exclude={"index"}) for call in message.tool_calls]
    return fields


def _content(message: ChatMessage, where: str, found: Found | None) -> str | list[Part]:
    content, param = message.content, f"{where}.content"
    if isinstance(content, str):
        return content
    if content is None:
        said = message.tool_calls or message.reasoning_content or message.reasoning
        if message.role == "assistant" and (said or message.refusal is not None):
            return message.refusal or ""
        raise invalid(
            param,
            f"{param} is missing; write a text (only an assistant's message with tool_calls may "
            "go without)",
            "missing_field",
        )
    if not isinstance(content, list) or len(content) > MAX_PARTS:
        raise invalid(
            param,
            f"{param} is {json_type(content)} (allowed: a text, or a list of at most {MAX_PARTS} "
            "text parts)",
        )
    return [_part_of(part, f"{param}[{index}]", found) for index, part in enumerate(content)]


def _part_of(part: object, where: str, found: Found | None) -> Part:
    if found is None or not is_picture_part(part):
        return text_part(_part(part, where))
    found.append((where, asked_picture(part, where)))
    return {"type": "image"}


def _part(part: object, where: str) -> str:
    if not isinstance(part, dict):
        raise invalid(where, f"{where} is {json_type(part)} (allowed: an object with type, text)")
    kind = part.get("type", "text")
    name = "refusal" if kind == "refusal" else "text"
    text = part.get(name)
    if kind not in (*TEXT_PARTS, "refusal"):
        raise invalid(
            f"{where}.type",
            f"{where}.type is {quoted(kind)}, and this model reads text only (allowed: text)",
            "unsupported_content",
        )
    if not isinstance(text, str):
        raise invalid(f"{where}.{name}", f"{where}.{name} is {json_type(text)} (allowed: a text)")
    return text


def template_values(values: object, effort: str | None) -> dict[str, Any]:
    """A request's values for the chat template, besides messages and tools. ApiError 400."""
    name = "chat_template_kwargs"
    if values is None:
        values = {}
    if not isinstance(values, dict) or len(values) > MAX_TEMPLATE_VALUES:
        raise invalid(
            name,
            f"{name} is {json_type(values)} (allowed: an object of at most {MAX_TEMPLATE_VALUES} "
            "values)",
        )
    for key in values:
        if not key.isidentifier() or key in _TEMPLATE_NAMES or key.endswith("_token"):
            raise invalid(
                f"{name}.{key[:80]}", f"{name} has {quoted(key)}, which a request cannot set"
            )
    return dict(values) if effort is None else {"reasoning_effort": effort, **values}
