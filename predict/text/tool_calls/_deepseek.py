"""What DeepSeek's formats share: calls between marks, each a name, a separator and arguments."""

from __future__ import annotations

from collections.abc import Callable

from predict.guide import Guide
from predict.text.lark import GuideContext
from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import ToolRules, guide_of
from predict.text.tool_calls._json import arguments
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool, ToolUse

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
LINE = r"/\n?/"
MARKS = (CALLS_BEGIN, BEGIN, SEPARATOR, END, CALLS_END)


def reads(reader: Reader, output: Output, use: ToolUse) -> Steps[None]:
    """Reads either format: some fine-tuned models write the other one's."""
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
            output.content(mark + reader.recorded())
            continue
        reader.recorded()
        output.begin_call(name)
        if (yield from arguments(reader, output.arguments)):
            yield from reader.spaces()
            yield from reader.literal("```")
        else:
            yield from reader.until((END,), output.arguments)
        # Ends of calls that stand where they should are markup, and so are those that do not.
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


def guide(
    use: ToolUse, context: GuideContext, call: Callable[[ToolRules, Tool], str]
) -> Guide | None:
    """The guide of a format; `call`: what stands between the marks of one call."""

    def start(rules: ToolRules) -> str:
        body = rules.any_tool(lambda tool: call(rules, tool))
        one = rules.rule(f"{rules.mark(BEGIN)} {body} {rules.mark(END)}")
        end = rules.mark(CALLS_END)
        calls = f"{rules.calls(one, LINE)} {end}"
        if use.is_forced:
            return f"{rules.thought()} {rules.mark(CALLS_BEGIN)} {calls}"
        # Nothing follows calls.
        return f"{rules.free_text()} | {rules.text_until(CALLS_BEGIN)} {calls}"

    return guide_of(use, context, start)
