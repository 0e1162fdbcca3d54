"""DeepSeek's formats: calls between marks, each a name, a separator and arguments."""

from __future__ import annotations

from collections.abc import Callable

from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import arguments
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool, ToolUse

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
LINE = r"/\n?/"
MARKS = (CALLS_BEGIN, BEGIN, SEPARATOR, END, CALLS_END)


def _reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    """Reads both formats: some fine-tuned models write the other one."""
    begins = (CALLS_BEGIN, BEGIN)
    marks: tuple[str, ...] = begins
    while mark := (yield from reader.until(marks, output.content)):
        if mark not in begins:
            continue
        reader.record()
        if mark == CALLS_BEGIN:
            yield from reader.spaces()
            yield from reader.literal(BEGIN)
            yield from reader.spaces()
        name = yield from _name(reader)
        if name is None:
            output.content(reader.rejected(mark))
            continue
        reader.recorded()
        output.begin_call(name)
        if (yield from arguments(reader, output.arguments)):
            yield from reader.spaces()
            yield from reader.literal("```")
        else:
            yield from reader.until((END,), output.arguments)
        # Behind a call all marks are markup, also those that are out of place.
        marks = MARKS


def _name(reader: Reader) -> Steps[str | None]:
    """The name of a call, up to where its arguments begin; None where it is no call."""
    name = yield from reader.run(NAME_CHARACTERS)
    if not (yield from reader.literal(SEPARATOR)):
        return None
    yield from reader.spaces()
    if name == "function" and (yield from reader.peek()) != "{":
        name = yield from reader.run(NAME_CHARACTERS)
        yield from reader.spaces()
        yield from reader.literal("```json", "```")
        yield from reader.spaces()
    return name if name and (yield from reader.peek()) == "{" else None


def deepseek_format(
    name: str, models: str, marks: tuple[str, ...], call: Callable[[ToolRules, Tool], str]
) -> CallFormat:
    """A format. call: the rule of what stands between the marks of one call."""

    def start(rules: ToolRules) -> str:
        body = rules.any_tool(lambda tool: call(rules, tool))
        one = rules.rule(f"{rules.mark(BEGIN)} {body} {rules.mark(END)}")
        return rules.behind_text(CALLS_BEGIN, f"{rules.calls(one, LINE)} {rules.mark(CALLS_END)}")

    return CallFormat(
        name=name,
        models=models,
        marks=marks,
        begins=(CALLS_BEGIN, BEGIN),
        kept_tokens=MARKS,
        reads=_reads,
        start=start,
    )
