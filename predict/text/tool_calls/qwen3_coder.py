"""Qwen3-Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>.

Values are bare text; what of them is JSON is known by the tool's schema alone. A parameter that the
schema calls a text goes out as it comes, any other one when it is whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from predict.errors import UserError
from predict.system.files import parse_json
from predict.text.lark import literal
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool, ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
PYTHON = {"True": "true", "False": "false", "None": "null"}


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    begins = (BEGIN, FUNCTION)
    marks: tuple[str, ...] = begins
    while mark := (yield from reader.until(marks, output.content)):
        marks = begins
        if mark == END:
            continue
        reader.record()
        if mark == BEGIN:
            yield from reader.spaces()
            yield from reader.literal(FUNCTION)
        name = yield from reader.run(NAME_CHARACTERS)
        is_call = bool(name) and (yield from reader.literal(">"))
        text = reader.recorded()
        if not is_call:
            output.content(mark + text)
            continue
        output.begin_call(name)
        yield from _parameters(reader, output, _properties(use, name))
        marks = (*begins, END)


def _parameters(reader: Reader, output: Output, properties: Mapping[str, Any]) -> Steps[None]:
    """Emits a call's parameters as JSON, which is cut off where they are."""
    separator = "{"
    while True:
        yield from reader.spaces()
        mark = yield from reader.literal(PARAMETER, FUNCTION_END)
        if mark != PARAMETER:
            break
        pieces: list[str] = []
        if not (yield from reader.until((">",), pieces.append)):
            return
        key = "".join(pieces)
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        separator = ", "
        if not (yield from _value(reader, output, _is_text(properties.get(key)))):
            return
    if mark or (yield from reader.peek()):
        output.arguments("{}" if separator == "{" else "}")


def _value(reader: Reader, output: Output, is_text: bool) -> Steps[bool]:
    """Reads a value up to its end, if it has one; the line breaks around it are markup."""
    held: list[str] = []  # a text's last line break, or all of another value

    def text(piece: str) -> None:
        piece = "".join([*held, piece])
        held[:] = ["\n"] if piece.endswith("\n") else []
        output.arguments(json.dumps(piece.removesuffix("\n"), ensure_ascii=False)[1:-1])

    yield from reader.literal("\n")
    if is_text:
        output.arguments('"')
        end = yield from reader.until((PARAMETER_END,), text)
        output.arguments('"' if end else "")
    else:
        end = yield from reader.until((PARAMETER_END,), held.append)
        output.arguments(_json("".join(held).removesuffix("\n")))
    return end is not None


def _is_text(schema: Any) -> bool:
    """Whether a parameter's values are texts, whatever they look like."""
    if not isinstance(schema, Mapping):
        return False
    choices = schema.get("enum")
    if isinstance(choices, list) and choices:
        return all(isinstance(each, str) for each in choices)
    return schema.get("type") == "string"


def _json(text: str) -> str:
    """A value as JSON: itself, where it is JSON, else as a text."""
    bare = text.strip()
    bare = PYTHON.get(bare, bare)
    try:
        parse_json(bare, "a parameter")
    except UserError:
        return json.dumps(text, ensure_ascii=False)
    return bare


def _properties(use: ToolUse, name: str) -> Mapping[str, Any]:
    for tool in use.tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _start(rules: ToolRules) -> str:
    def called(tool: Tool) -> str:
        head = literal(f"{tool.name}>\n")
        return f"{head} {' '.join(_parameter_rules(rules, tool))}"

    ends = f"{literal(FUNCTION_END)} /\\n?/ {rules.mark(END)}"
    rest = rules.rule(f"/\\n?/ {literal(FUNCTION)} {rules.any_tool(called)} {ends}")
    return rules.amid_text(BEGIN, rest, "/[ \\n]{0,2}/")


def _parameter_rules(rules: ToolRules, tool: Tool) -> list[str]:
    """The parameters of a tool in the order of its schema; any, where it names none."""
    end = literal(f"\n{PARAMETER_END}\n")
    text = rules.rule(f"TEXT {end}", "[lazy]")
    properties = rules.properties(tool)
    if not properties:
        return [f'({literal(PARAMETER)} /[^<>\\n]{{1,64}}/ ">\\n" {text})*']
    required = tool.parameters.get("required")
    needed = required if isinstance(required, list) else []
    parts = []
    for key, schema in properties.items():
        if not _is_text(schema):
            value = f"{rules.json(schema, tool.strict)} {end}"
        elif "enum" in schema:
            value = f"({' | '.join(map(literal, schema['enum']))}) {end}"
        else:
            value = text
        one = rules.rule(f"{literal(f'{PARAMETER}{key}>')} /\\n/ {value}")
        parts.append(one if key in needed else f"{one}?")
    return parts


FORMAT = CallFormat(
    name="qwen3_coder",
    models="Qwen3-Coder",
    marks=(BEGIN, END, FUNCTION, PARAMETER),
    kept_tokens=(BEGIN, END),
    reads=_reads,
    start=_start,
)
