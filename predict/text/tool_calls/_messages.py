"""Conversations with calls in them, as the chat templates of different models read them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from predict.errors import UserError
from predict.system.files import parse_json
from predict.text.conversation import Message
from predict.text.tool_calls._guides import CallFormat

# A template that joins arguments to its own text takes texts alone: + tool['arguments'] +
_JOINS_ARGUMENTS = re.compile(r"\+\s*[\w.'\"\[\]]*\barguments\b['\"\]]*\s*(?:\+|-?\}\}|-?%\})")
# One that walks over arguments takes objects alone.
_WALKS_ITEMS = re.compile(r"\|\s*items\b|\.items\(\)")
# Mistral's say so of ids, and refuse others.
_NINE_CHARACTERS = re.compile(r"\|\s*length\s*!=\s*9\b")
_NINE = re.compile(r"[A-Za-z0-9]{9}")


def shaped_messages(
    messages: Sequence[Message], source: str, row: CallFormat | None
) -> list[Message]:
    """OpenAI's messages as the template with this source reads them; none is changed in place.

    row: the form of calls of a template that writes none itself; they become content.

    Arguments become objects, or texts where the template takes no objects. What is not a JSON
    object stays as it is; a template that takes objects alone gets it under the key "arguments".
    Results get their tool's name, and ids the form that the template wants. Thoughts stand under
    each name that templates use.
    """
    names: dict[str, str] = {}  # of the tool that a call's id stands for
    made = []
    for message in messages:
        message = dict(message)
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            calls = message["tool_calls"] = [_call(call, source, names) for call in calls]
            if row is not None and row.writes is not None and (named := _named(calls)):
                message["content"] = _with_text(message.get("content"), row.writes(named))
        given_id = message.get("tool_call_id")
        if isinstance(given_id, str):
            if message.get("role") == "tool" and given_id in names:
                message.setdefault("name", names[given_id])
            message["tool_call_id"] = _id(given_id, source)
        thoughts = message.get("reasoning_content") or message.pop("reasoning", None)
        if message.get("role") == "assistant" and isinstance(thoughts, str) and thoughts:
            message["reasoning_content"] = message["reasoning"] = thoughts
            # gpt-oss' template refuses content and thoughts side by side.
            if not message.get("content"):
                message["thinking"] = thoughts
        made.append(message)
    return made


def _named(calls: Sequence[Any]) -> list[tuple[str, Any]]:
    """Names and arguments; what is no call is not there."""
    held = [call.get("function") for call in calls if isinstance(call, Mapping)]
    functions = [each for each in held if isinstance(each, Mapping)]
    return [(str(each.get("name")), each.get("arguments")) for each in functions]


def _with_text(content: Any, text: str) -> Any:
    """A content, text or parts, and a text behind it."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content or ''}{text}"


def _call(call: Any, source: str, names: dict[str, str]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    made = {**call, "function": {**function, "arguments": _arguments(function, source)}}
    if isinstance(call.get("id"), str):
        names[call["id"]] = str(function.get("name"))
        made["id"] = _id(call["id"], source)
    return made


def _arguments(function: Mapping[str, Any], source: str) -> Any:
    given = function.get("arguments")
    found = given
    if isinstance(given, str):
        # What is no JSON stays as the model wrote it.
        with contextlib.suppress(UserError):
            found = parse_json(given or "{}", "arguments")
    found = {} if found is None else found
    if not isinstance(found, Mapping):
        return {"arguments": found} if _WALKS_ITEMS.search(source) else given
    return json.dumps(found, ensure_ascii=False) if _JOINS_ARGUMENTS.search(source) else found


def _id(given: str, source: str) -> str:
    """The id, or nine characters that stand for it, the same ones each time."""
    if not _NINE_CHARACTERS.search(source) or _NINE.fullmatch(given):
        return given
    return hashlib.sha256(given.encode()).hexdigest()[:9]
