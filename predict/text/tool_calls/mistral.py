"""Mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}], and later [TOOL_CALLS]name[ARGS]{...}.

The list is of tokenizers up to v7; the later form, one mark per call, of v11 and on. v11 has an id
besides: [TOOL_CALLS]name[CALL_ID]id[ARGS]{...}.
"""

from __future__ import annotations

import re

from predict.text.deltas import short_call_id
from predict.text.lark import literal
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import Outcome, arguments
from predict.text.tool_calls._lists import calls_of_list, guided_list
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool, ToolUse

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ID = re.compile(r"[A-Za-z0-9]*")


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    mark = yield from reader.until((BEGIN,), output.content)
    while mark:
        reader.record()
        yield from reader.spaces()
        is_list = yield from reader.literal("[")
        outcome = yield from (calls_of_list if is_list else _named)(reader, output)
        # Of calls that went out nothing is recorded any more.
        output.content(reader.rejected(BEGIN if outcome is Outcome.NONE else ""))
        emit = output.arguments if outcome is Outcome.CUT else output.content
        mark = yield from reader.until((BEGIN,), emit)


def _named(reader: Reader, output: Output) -> Steps[Outcome]:
    """One call, its name ahead of its arguments."""
    name = yield from reader.run(NAME_CHARACTERS)
    given_id = ""
    if (yield from reader.literal(CALL_ID)):
        given_id = yield from reader.run(_ID)
    yield from reader.literal(ARGS)
    yield from reader.spaces()
    if not name or (yield from reader.peek()) != "{":
        return Outcome.NONE
    reader.record()
    output.begin_call(name, given_id or None)
    is_whole = yield from arguments(reader, output.arguments)
    reader.record()
    return Outcome.WHOLE if is_whole else Outcome.CUT


def _start(rules: ToolRules) -> str:
    if rules.has_token(ARGS):
        call_id = f"({rules.mark(CALL_ID)} /[A-Za-z0-9]{{9}}/)?"

        def named(tool: Tool) -> str:
            return f"{literal(tool.name)} {call_id} {rules.mark(ARGS)} {rules.arguments(tool)}"

        calls = rules.calls(rules.any_tool(named), rules.mark(BEGIN))
    else:
        calls = guided_list(rules)
    return rules.behind_text(BEGIN, calls)


FORMAT = CallFormat(
    name="mistral",
    models="Mistral 7B Instruct from v0.3 on, Nemo, Large, Small, Ministral, Magistral, Devstral",
    marks=(BEGIN,),
    begins=(BEGIN,),
    kept_tokens=(BEGIN, CALL_ID, ARGS),
    reads=_reads,
    start=_start,
    new_id=short_call_id,
)
