"""Kimi K2: calls between marks, each an id that has the name, functions.name:0, and arguments."""

from __future__ import annotations

import re

from predict.text.lark import literal
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import arguments
from predict.text.tool_calls._records import Tool, ToolUse

CALLS_BEGIN, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
BEGIN, END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
MARKS = (CALLS_BEGIN, BEGIN, ARGUMENTS, END, CALLS_END)
NAMESPACE = "functions."
_ID = re.compile(r"[A-Za-z0-9_.:-]*")


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    begins = (CALLS_BEGIN, BEGIN)
    marks: tuple[str, ...] = begins
    while mark := (yield from reader.until(marks, output.content)):
        if mark not in begins:
            continue
        reader.record()
        yield from reader.spaces()
        if mark == CALLS_BEGIN:
            yield from reader.literal(BEGIN)
            yield from reader.spaces()
        given_id = yield from reader.run(_ID)
        yield from reader.spaces()
        name = given_id.removeprefix(NAMESPACE).partition(":")[0]
        is_call = bool(name) and (yield from reader.literal(ARGUMENTS))
        text = reader.rejected(mark)
        if not is_call:
            output.content(text)
            continue
        output.begin_call(name, given_id)
        yield from reader.spaces()
        if not (yield from arguments(reader, output.arguments)):
            yield from reader.until((END,), output.arguments)
        # Behind a call all marks are markup.
        marks = MARKS


def _start(rules: ToolRules) -> str:
    def called(tool: Tool) -> str:
        head = f"{literal(f'{NAMESPACE}{tool.name}:')} /[0-9]{{1,4}}/ {rules.mark(ARGUMENTS)}"
        return f"{head} {rules.arguments(tool)}"

    one = rules.rule(f"{rules.mark(BEGIN)} {rules.any_tool(called)} {rules.mark(END)}")
    return rules.behind_text(CALLS_BEGIN, f"{rules.calls(one)} {rules.mark(CALLS_END)}")


FORMAT = CallFormat(
    name="kimi_k2",
    models="Kimi K2",
    marks=(CALLS_BEGIN, BEGIN, ARGUMENTS),
    begins=(CALLS_BEGIN, BEGIN),
    kept_tokens=MARKS,
    reads=_reads,
    start=_start,
)
