"""Forms whose calls stand between marks in one section: DeepSeek's, Kimi K2's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from predict.text.markup import Output, Reader, Steps
from predict.text.tool_calls._guides import CallFormat, ToolRules
from predict.text.tool_calls._json import arguments
from predict.text.tool_calls._records import Tool


class Section(NamedTuple):
    """The marks around a section of calls, and around each of them."""

    begin: str
    call: str  # ahead of a call's head
    arguments: str  # behind a part of the head, or all of it
    call_end: str
    end: str


class Head(NamedTuple):
    """What stands ahead of a call's arguments."""

    name: str
    given_id: str | None = None


# Reads up to the arguments; None where it is no call.
ReadHead = Callable[[Reader], Steps[Head | None]]


def section_format(
    name: str,
    models: str,
    marks: tuple[str, ...],
    section: Section,
    head: ReadHead,
    call: Callable[[ToolRules, Tool], str],
) -> CallFormat:
    """The format of calls in such a section. call: the rule of what is between a call's marks."""

    def start(rules: ToolRules) -> str:
        body = rules.any_tool(lambda tool: call(rules, tool))
        one = rules.rule(f"{rules.mark(section.call)} {body} {rules.mark(section.call_end)}")
        calls = rules.calls(one, r"/\n?/")
        return rules.behind_text(section.begin, f"{calls} {rules.mark(section.end)}")

    return CallFormat(
        name=name,
        models=models,
        marks=marks,
        begins=(section.begin, section.call),
        kept_tokens=section,
        reads=lambda reader, output, _: _reads(section, head, reader, output),
        start=start,
    )


def _reads(section: Section, read_head: ReadHead, reader: Reader, output: Output) -> Steps[None]:
    begins = (section.begin, section.call)
    marks: tuple[str, ...] = begins
    while mark := (yield from reader.until(marks, output.content)):
        if mark not in begins:
            continue
        reader.record()
        yield from reader.spaces()
        if mark == section.begin:
            yield from reader.literal(section.call)
            yield from reader.spaces()
        head = yield from read_head(reader)
        if head is None:
            output.content(reader.rejected(mark))
            continue
        reader.recorded()
        output.begin_call(*head)
        if (yield from arguments(reader, output.arguments)):
            yield from reader.spaces()
            yield from reader.literal("```")
        else:
            yield from reader.until((section.call_end,), output.arguments)
        # Behind a call all marks are markup, also those that are out of place.
        marks = section
