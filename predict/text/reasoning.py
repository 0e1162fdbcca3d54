"""The thoughts in front of an answer, separated by their marks: one row per kind of marks.

A prompt whose chat template has opened the thought ends with its first mark, and the answer begins
inside the thought. predict.text.tool_calls.harmony reads thoughts by their channel instead.
"""

from __future__ import annotations

from dataclasses import dataclass

from predict.errors import one_of
from predict.text.deltas import Delta, Parser, call_id
from predict.text.markup import Output, Reader, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks around a thought."""

    name: str
    models: str  # that write so, for the documentation
    begin: str
    end: str

    @property
    def kept_tokens(self) -> tuple[str, ...]:
        """Special tokens that must stay in an answer's text."""
        return (self.begin, self.end)

    def is_opened_by(self, prompt: str) -> bool:
        """Whether an answer to this prompt begins within a thought."""
        return prompt.rstrip().endswith(self.begin)


FORMATS = {
    row.name: row
    for row in (
        ReasoningFormat("think", "Qwen3, QwQ, DeepSeek R1 and V3.1", "<think>", "</think>"),
        ReasoningFormat("mistral", "Magistral", "[THINK]", "[/THINK]"),
    )
}


def reasoning_of(name: str) -> ReasoningFormat:
    """The row of that name; raises UserError naming the known ones."""
    if name not in FORMATS:
        raise one_of("reasoning_parser", name, FORMATS)
    return FORMATS[name]


def detected(template: str) -> ReasoningFormat | None:
    """The row whose marks the source of a chat template has; None without one."""
    rows = (row for row in FORMATS.values() if row.begin in template and row.end in template)
    return next(rows, None)


class ReasoningParser:
    """Reads a thought at the beginning, and gives the rest to another parser."""

    def __init__(self, row: ReasoningFormat, is_thinking: bool, inner: Parser) -> None:
        """is_thinking: whether the prompt has opened the thought."""
        self._row = row
        self._inner = inner
        self._reader = Reader()
        self._output = Output(call_id)
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
        return deltas + self._inner.finish()

    def _go_on(self) -> list[Delta]:
        assert self._steps is not None
        for _ in self._steps:
            return self._output.take()
        self._steps = None
        return self._output.take() + self._inner.feed(self._reader.rest())

    def _read(self, is_thinking: bool) -> Steps[None]:
        self._reader.record()
        yield from self._reader.spaces()
        has_begin = yield from self._reader.literal(self._row.begin)
        before = self._reader.recorded()
        if not has_begin and not is_thinking:
            self._reader.unread(before)
            return
        yield from self._reader.until((self._row.end,), self._output.reasoning)
        yield from self._reader.spaces()
