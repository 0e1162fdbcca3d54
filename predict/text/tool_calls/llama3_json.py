"""Llama 3.1 to 3.3: {"name": ..., "parameters": {...}}, or several of it with ; between.

<|python_tag|> may stand before it, and then text before that. Without the tag the answer may be
JSON that calls nothing, so it counts as a call only with a known tool's name and no other keys.
"""

from __future__ import annotations

from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import CallKeys, Outcome, call_object
from predict.text.tool_calls._records import ToolUse

TAG = "<|python_tag|>"
OTHER_KEYS = ("type", "id")  # {"type": "function", ...} is what Llama 3.2 likes to write


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    keys = CallKeys(others=OTHER_KEYS, names=[tool.name for tool in use.allowed])
    begin: str | None = ""
    while begin is not None:
        reader.record()
        yield from reader.spaces()
        if not begin:
            yield from reader.literal(TAG)
            yield from reader.spaces()
        outcome = yield from call_object(reader, output, keys)
        # JSON without the tag may be content, and then it may be cut.
        text = reader.rejected(begin) if begin == TAG else begin + reader.recorded()
        if outcome is Outcome.CUT:
            yield from reader.until((), output.arguments)
            return
        if outcome is Outcome.WHOLE:
            output.content((yield from reader.spaces()))
            begin = yield from reader.literal(";")
            if begin:
                continue
        else:
            output.content(text)
        begin = yield from reader.until((TAG,), output.content)


def _start(rules: ToolRules) -> str:
    calls = rules.rule(rules.calls(rules.call_object("parameters"), "/; ?/"))
    tag = rules.mark(TAG)
    thought = rules.thought()
    if rules.use.is_forced:
        return f"{thought} ({tag})? {calls}"
    # Text that begins with a brace is a call.
    text = rules.rule("/\\s*[^{\\s](.|\\n)*/")
    return f"{thought} ({text}? | ({text} {tag} | {tag})? {calls})"


FORMAT = CallFormat(
    name="llama3_json",
    models="Llama 3.1, 3.2, 3.3",
    marks=("<|start_header_id|>", '"name":', '"parameters":'),
    begins=(TAG,),
    kept_tokens=(TAG,),
    reads=_reads,
    start=_start,
)
