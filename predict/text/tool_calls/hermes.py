"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, between any text."""

from __future__ import annotations

from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import CallKeys, Outcome, call_object
from predict.text.tool_calls._records import ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    marks: tuple[str, ...] = (BEGIN,)
    while mark := (yield from reader.until(marks, output.content)):
        marks = (BEGIN,)
        if mark == END:
            continue
        reader.record()
        yield from reader.spaces()
        outcome = yield from call_object(reader, output, CallKeys())
        text = reader.rejected(BEGIN)
        if outcome is Outcome.NONE:
            output.content(text)
        elif outcome is Outcome.CUT:
            yield from reader.until((END,), output.arguments)
        else:
            # What stands between a whole call and its end, such as a brace too many, is text.
            marks = (BEGIN, END)


def _start(rules: ToolRules) -> str:
    rest = rules.rule(f"/\\n?/ {rules.call_object()} /\\n?/ {rules.mark(END)}")
    return rules.amid_text(BEGIN, rest, "/[ \\n]{0,2}/")


FORMAT = CallFormat(
    name="hermes",
    models="Qwen2.5, Qwen3, QwQ, Hermes 2 Pro and 3, SmolLM3, ERNIE X1 and 4.5 Thinking, EXAONE 4, "
    "Granite 4",
    marks=(BEGIN, END, '"name":', '"arguments":'),
    begins=(BEGIN,),
    kept_tokens=(BEGIN, END),
    reads=_reads,
    start=_start,
)
