"""The thoughts in front of an answer, separated by their marks: one row per kind of marks.

A prompt whose chat template has opened the thought ends with its first mark, and the answer begins
inside the thought. predict.text.tool_calls.harmony reads thoughts by their channel instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from predict.errors import one_of
from predict.text.deltas import (
    CallBegin,
    ContentDelta,
    Delta,
    Parser,
    ReasoningDelta,
    ThoughtEnd,
    call_id,
)
from predict.text.markup import Output, Reader, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around a thought, and those that may stand around the content behind it."""

    name: str
    models: str  # that write so, for the documentation
    begin: str
    end: str
    content: tuple[str, str] | None = None
    other: str = ""  # a text of templates in which the marks around content have another sense

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that must stay in an answer's text."""
        return (self.begin, self.end, *(self.content or ()))

    def is_opened_by(self, prompt: str) -> bool | None:
        """Whether an answer to this prompt begins within a thought; None: behind one."""
        prompt = prompt.rstrip()
        return prompt.endswith(self.begin) or (None if prompt.endswith(self.end) else False)


# The first that fits a chat template is taken.
FORMATS = {
    row.name: row
    for row in (
        ReasoningFormat(
            "ernie_x1", "ERNIE X1 and 4.5 Thinking, Granite 3.3", "<think>", "</think>",
            ("<response>", "</response>"),
            other="<minimax:tool_call>",  # around results of tools
        ),
        ReasoningFormat(
            "hunyuan", "Hunyuan", "<think>", "</think>", ("<answer>", "</answer>"),
        ),
        ReasoningFormat(
            "think",
            "Qwen3, QwQ, DeepSeek R1 and V3.1, GLM-4.5 to 4.7, Kimi K2, MiniMax M2, EXAONE 4, "
            "OLMo 3",
            "<think>", "</think>",
        ),
        ReasoningFormat("mistral", "Magistral, Ministral 3", "[THINK]", "[/THINK]"),
        ReasoningFormat("seed_oss", "Seed-OSS", "<seed:think>", "</seed:think>"),
    )
}  # fmt: skip


def reasoning_of(name: str) -> ReasoningFormat:
    """The row of that name; raises UserError naming the known ones."""
    if name not in FORMATS:
        raise one_of("reasoning_parser", name, FORMATS)
    return FORMATS[name]


def detected(template: str) -> ReasoningFormat | None:
    """The row whose marks the source of a chat template has; None without one.

    The end alone tells: some templates only take the thoughts of earlier turns away.
    """

    def fits(row: ReasoningFormat) -> bool:
        has_marks = all(mark in template for mark in (row.end, *(row.content or ())))
        return has_marks and not (row.other and row.other in template)

    return next(filter(fits, FORMATS.values()), None)


class ReasoningParser:
    """Reads a thought at the beginning, and gives the rest to another parser.

    A call in a thought is a part of it, unless the thought never ends. The end alone ends a thought
    too, where neither a call nor the beginning of a thought stands ahead of it.
    """

    def __init__(
        self,
        row: ReasoningFormat,
        is_thinking: bool | None,
        make_inner: Callable[[], Parser],
        begins: Sequence[str] = (),
    ) -> None:
        """is_thinking: see ReasoningFormat.is_opened_by. begins: marks of calls."""
        self._row = row
        self._make_inner = make_inner
        self._inner = make_inner()
        self._has_called = False
        self._begins = tuple(begins)
        self._reader = Reader()
        self._output = Output(call_id)
        self._content: list[Delta] = []
        self._left_open = ""  # from the first mark of a call on
        self._steps: Steps[None] | None = self._read(is_thinking)
        next(self._steps)

    def feed(self, text: str) -> list[Delta]:
        """The deltas that this text makes certain."""
        if self._steps is None:
            return self._inner.feed(text)
        if not text:
            return []
        self._reader.add(text)
        return self._go_on()

    def finish(self) -> list[Delta]:
        """The deltas of the text that was held back."""
        deltas: list[Delta] = []
        if self._steps is not None:
            self._reader.end()
            deltas = self._go_on()
        return deltas + (self._unclosed() if self._left_open else self._inner.finish())

    def _go_on(self) -> list[Delta]:
        assert self._steps is not None
        for _ in self._steps:
            return self._taken()
        self._steps = None
        return self._taken() + self._inner.feed(self._reader.rest())

    def _taken(self) -> list[Delta]:
        content, self._content = self._content, []
        return self._output.take() + content

    def _read(self, is_thinking: bool | None) -> Steps[None]:
        reader, row = self._reader, self._row
        reader.record()
        yield from reader.spaces()
        has_begin = yield from reader.literal(row.begin)
        before = reader.recorded()
        if has_begin or is_thinking:
            mark = yield from reader.until((row.end, *self._begins), self._output.reasoning)
            if mark in self._begins:
                pieces = [mark]
                mark = yield from reader.until((row.end,), pieces.append)
                if mark is None:
                    self._left_open = "".join(pieces)
                    return
                self._output.reasoning("".join(pieces))
            yield from reader.spaces()
        if (yield from self._marked_content()) or has_begin or is_thinking:
            return
        reader.unread(before)
        if is_thinking is None:
            return
        mark = yield from reader.until((row.begin, row.end), self._feed_inner)
        if mark == row.end and not self._has_called:
            self._content += self._inner.finish()
            self._inner = self._make_inner()
            spaces = yield from reader.spaces()
            self._content.append(ThoughtEnd(mark + spaces))
            yield from self._marked_content()
        elif mark:
            self._feed_inner(mark)

    def _marked_content(self) -> Steps[bool]:
        """Reads the content between marks of its own; whether it begins here."""
        begin, end = self._row.content or ("", "")
        if not begin or not (yield from self._reader.literal(begin)):
            return False
        yield from self._reader.spaces()
        yield from self._reader.until((end, f"\n{end}"), self._feed_inner)
        yield from self._reader.spaces()
        return True

    def _feed_inner(self, text: str) -> None:
        deltas = self._inner.feed(text)
        self._has_called |= any(isinstance(delta, CallBegin) for delta in deltas)
        self._content += deltas

    def _unclosed(self) -> list[Delta]:
        """The calls in a thought that never ended, and the rest of it."""
        found = [*self._inner.feed(self._left_open), *self._inner.finish()]
        if not any(isinstance(delta, CallBegin) for delta in found):
            self._output.reasoning(self._left_open)
            return self._output.take()
        return [ReasoningDelta(d.text) if isinstance(d, ContentDelta) else d for d in found]
