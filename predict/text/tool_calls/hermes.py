"""Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, between any text."""

from __future__ import annotations

from collections.abc import Mapping

from predict.guide import Guide
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._json import CallKeys, Outcome, call_object
from predict.text.tool_calls._records import Format, ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
KEYS = CallKeys()


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    marks: tuple[str, ...] = (BEGIN,)
    while True:
        mark = yield from reader.until(marks, output.content)
        if mark is None:
            return
        marks = (BEGIN,)
        if mark == END:
            continue
        reader.record()
        yield from reader.spaces()
        outcome = yield from call_object(reader, output, KEYS)
        text = reader.recorded()
        if outcome is Outcome.NONE:
            output.content(BEGIN + text)
            continue
        if outcome is Outcome.CUT:
            yield from reader.until((END,), output.arguments)
            continue
        # Whatever stands between a whole call and its end, such as a brace too many, is text.
        marks = (BEGIN, END)


def _guide(use: ToolUse, special_tokens: Mapping[str, int]) -> Guide | None:
    return None


FORMAT = Format(
    name="hermes",
    models="Hermes 2 Pro and 3, Qwen2.5, Qwen3, QwQ",
    marks=(BEGIN, END, '"arguments"'),
    kept_tokens=(BEGIN, END),
    reads=_reads,
    guide=_guide,
)
