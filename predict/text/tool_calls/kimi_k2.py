"""Kimi K2: calls between marks, each an id that has the name, functions.name:0, and arguments."""

from __future__ import annotations

import re

from predict.text.lark import literal
from predict.text.markup import Reader, Steps
from predict.text.tool_calls._guides import ToolRules
from predict.text.tool_calls._records import Tool
from predict.text.tool_calls._sections import Head, Section, section_format

MARKS = Section(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)
NAMESPACE = "functions."
_ID = re.compile(r"[A-Za-z0-9_.:-]*")


def _head(reader: Reader) -> Steps[Head | None]:
    given_id = yield from reader.run(_ID)
    yield from reader.spaces()
    name = given_id.removeprefix(NAMESPACE).partition(":")[0]
    if not name or not (yield from reader.literal(MARKS.arguments)):
        return None
    yield from reader.spaces()
    return Head(name, given_id)


def _call(rules: ToolRules, tool: Tool) -> str:
    head = f"{literal(f'{NAMESPACE}{tool.name}:')} /[0-9]{{1,4}}/ {rules.mark(MARKS.arguments)}"
    return f"{head} {rules.arguments(tool)}"


FORMAT = section_format(
    "kimi_k2", "Kimi K2", (MARKS.begin, MARKS.call, MARKS.arguments), MARKS, _head, _call
)
