"""Acme: <call=name>{...}</call>, between any text."""

from __future__ import annotations

from predict.text.lark import literal
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import arguments
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool, ToolUse

BEGIN, END = "<call=", "</call>"


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    while (yield from reader.until((BEGIN,), output.content)):
        reader.record()
        name = yield from reader.run(NAME_CHARACTERS)
        is_call = bool(name) and (yield from reader.literal(">"))
        text = reader.rejected(BEGIN)
        if not is_call:
            output.content(text)
            continue
        output.begin_call(name)
        is_whole = yield from arguments(reader, output.arguments)
        # A call is out already when its arguments break: they get what there is of it.
        yield from reader.until((END,), output.content if is_whole else output.arguments)


def _start(rules: ToolRules) -> str:
    def called(tool: Tool) -> str:
        return f"{literal(f'{tool.name}>')} {rules.arguments(tool)}"

    rest = rules.rule(f"{rules.any_tool(called)} {rules.mark(END)}")
    return rules.amid_text(BEGIN, rest)


FORMAT = CallFormat(
    name="acme",
    models="Acme",
    marks=(BEGIN, END),
    begins=(BEGIN,),
    kept_tokens=(END,),
    reads=_reads,
    start=_start,
)
