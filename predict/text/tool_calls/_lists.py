"""Forms whose calls are one JSON list behind a mark: <mark>[{"name": ..., "arguments": {...}}]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import CallKeys, Outcome, call_object


def list_format(
    name: str, models: str, marks: tuple[str, ...], begins: tuple[str, ...], end: str = ""
) -> CallFormat:
    """The format of a list behind one of the marks `begins`, and ahead of `end`.

    begins: the first is the one that a guide asks for. end: "" where the answer ends with the list.
    """

    def reads(reader: Reader, output: Output) -> Steps[None]:
        wanted = begins
        while mark := (yield from reader.until(wanted, output.content)):
            wanted = begins
            if mark == end:
                continue
            reader.record()
            yield from reader.spaces()
            outcome = Outcome.NONE
            if (yield from reader.literal("[")):
                outcome = yield from calls_of_list(reader, output)
            # Of calls that went out nothing is recorded any more.
            output.content(reader.rejected(mark if outcome is Outcome.NONE else ""))
            if outcome is Outcome.CUT:
                yield from reader.until((end,) if end else (), output.arguments)
            elif outcome is Outcome.WHOLE and end:
                wanted = (*begins, end)

    def start(rules: ToolRules) -> str:
        behind = rules.mark(end) if end else ""
        return rules.behind_text(begins[0], f"{guided_list(rules)} {behind}")

    def writes(calls: Sequence[tuple[str, Any]]) -> str:
        made = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"{begins[0]}{json.dumps(made, ensure_ascii=False)}{end}"

    return CallFormat(
        name=name,
        models=models,
        marks=marks,
        begins=begins,
        kept_tokens=(*begins, *filter(None, (end,))),
        reads=lambda reader, output, _: reads(reader, output),
        start=start,
        writes=writes,
    )


def calls_of_list(reader: Reader, output: Output) -> Steps[Outcome]:
    """Reads the calls of a list behind its bracket."""
    is_first = True
    while True:
        yield from reader.spaces()
        outcome = yield from call_object(reader, output, CallKeys())
        if outcome is Outcome.NONE:
            return outcome if is_first else Outcome.WHOLE
        reader.record()
        if outcome is Outcome.CUT:
            return outcome
        is_first = False
        yield from reader.spaces()
        if not (yield from reader.literal(",")):
            break
    if (yield from reader.literal("]")):
        reader.record()
    return Outcome.WHOLE


def guided_list(rules: ToolRules) -> str:
    """The rule of a list of valid calls."""
    return f'"[" {rules.calls(rules.call_object(), "/, ?/")} "]"'
