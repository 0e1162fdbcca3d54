"""DeepSeek's formats: calls between marks, each a name, a separator and arguments."""

from __future__ import annotations

from collections.abc import Callable

from predict.text.markup import Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._records import NAME_CHARACTERS, Tool
from predict.text.tool_calls._sections import Head, Section, section_format

MARKS = Section(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)


def _head(reader: Reader) -> Steps[Head | None]:
    """Of both formats: some fine-tuned models write the other one."""
    name = yield from reader.run(NAME_CHARACTERS)
    if not (yield from reader.literal(MARKS.arguments)):
        return None
    yield from reader.spaces()
    if name == "function" and (yield from reader.peek()) != "{":
        name = yield from reader.run(NAME_CHARACTERS)
        yield from reader.spaces()
        yield from reader.literal("```json", "```")
        yield from reader.spaces()
    return Head(name) if name and (yield from reader.peek()) == "{" else None


def deepseek_format(
    name: str, models: str, marks: tuple[str, ...], call: Callable[[ToolRules, Tool], str]
) -> CallFormat:
    """A format. call: the rule of what stands between the marks of one call."""
    return section_format(name, models, (MARKS.begin, *marks), MARKS, _head, call)
