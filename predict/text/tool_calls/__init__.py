"""How models write tool calls: one module per format, each with a row named `FORMAT`.

A model's own format is found by what its chat template holds; a name (--tool_call_parser) overrides
that.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Sequence

from predict.errors import one_of
from predict.text.conversation import Message
from predict.text.deltas import ContentDelta, Delta, Parser
from predict.text.lark import GuideContext
from predict.text.markup import ContentStops, StepParser
from predict.text.reasoning import ReasoningFormat, ReasoningParser
from predict.text.tool_calls._forms import content_guide
from predict.text.tool_calls._guides import CallFormat
from predict.text.tool_calls._messages import shaped_messages
from predict.text.tool_calls._records import CHOICES, Tool, ToolUse

__all__ = [
    "CHOICES",
    "CallFormat",
    "GuideContext",
    "Tool",
    "ToolUse",
    "answer_parser",
    "content_guide",
    "detected",
    "format_of",
    "known_formats",
    "parser_of",
    "template_messages",
]


_BEFORE_COLON = re.compile(r'(["\w])\s+:')


def known_formats() -> list[str]:
    """The formats that have a module here."""
    names = (module.name for module in pkgutil.iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_"))


def format_of(name: str) -> CallFormat:
    """The format of that name; raises UserError naming the known ones."""
    if name not in known_formats():
        raise one_of("tool_call_parser", name, known_formats())
    found: CallFormat = importlib.import_module(f"{__name__}.{name}").FORMAT
    return found


def detected(template: str) -> CallFormat | None:
    """The format whose marks the source of a chat template has, the most of them; else None."""
    written = _BEFORE_COLON.sub(r"\1:", template.replace("\\", "").replace("'", '"'))
    rows = [format_of(name) for name in known_formats()]
    fitting = [row for row in rows if all(mark in written for mark in row.marks)]
    return max(fitting, key=lambda row: len(row.marks), default=None)


def template_messages(messages: Sequence[Message], source: str) -> list[Message]:
    """OpenAI's messages as the template with this source reads them; see `shaped_messages`.

    Calls of a template that writes none, as Granite 3's, stand in the content, in its form.
    """
    row = None if "tool_calls" in source else detected(source)
    return shaped_messages(messages, source, row)


def parser_of(row: CallFormat, use: ToolUse, stops: ContentStops | None = None) -> Parser:
    """A parser of one answer in this format."""
    return StepParser(lambda reader, output: row.reads(reader, output, use), row.new_id, stops)


def answer_parser(
    row: CallFormat | None,
    thoughts: ReasoningFormat | None,
    use: ToolUse,
    *,
    is_thinking: bool | None = False,
    stops: ContentStops | None = None,
) -> Parser:
    """A parser of one answer: thoughts first, then content and calls.

    is_thinking: see ReasoningFormat.is_opened_by. stops: end the content, and the answer with it.
    """
    if row is not None and row.is_whole:
        return parser_of(row, use, stops)
    calls = row if use.allowed else None

    def inner() -> Parser:
        return _Plain(stops) if calls is None else parser_of(calls, use, stops)

    if thoughts is None:
        return inner()
    begins = () if calls is None else calls.begins
    return ReasoningParser(thoughts, is_thinking, inner, begins)


class _Plain:
    """All text is content."""

    def __init__(self, stops: ContentStops | None) -> None:
        self._stops = stops or ContentStops()

    def feed(self, text: str) -> list[Delta]:
        text = self._stops.take(text)
        return [ContentDelta(text)] if text else []

    def finish(self) -> list[Delta]:
        text = self._stops.flush()
        return [ContentDelta(text)] if text else []
