"""The parts of one answer as its tokens come, up to the first stop string in its content."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from predict.answer_form import AnswerForm
from predict.text import reasoning, tool_calls
from predict.text.deltas import ContentDelta, Delta, Parser, ThoughtEnd
from predict.text.detokenizer import Detokenizer
from predict.text.markup import ContentStops
from predict.text.reasoning import ReasoningFormat
from predict.text.tokenizer import Tokenizer
from predict.text.tool_calls import CallFormat, Tool, ToolUse


class Forms(NamedTuple):
    """The rows of an answer's forms, and the tools that it may call."""

    calls: CallFormat | None
    thoughts: ReasoningFormat | None
    use: ToolUse = ToolUse()
    is_thinking: bool | None = False

    @classmethod
    def of(cls, form: AnswerForm) -> Forms:
        """The rows of those names. Raises UserError for a name that is not known."""
        return cls(
            None if form.calls is None else tool_calls.format_of(form.calls),
            None if form.thoughts is None else reasoning.reasoning_of(form.thoughts),
            ToolUse(tools=[Tool(name=name) for name in form.tools]),
            form.is_thinking,
        )

    def parser(self, stops: ContentStops) -> Parser:
        """A parser of one answer."""
        calls, thoughts, use, is_thinking = self
        return tool_calls.answer_parser(calls, thoughts, use, is_thinking=is_thinking, stops=stops)

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts that are markup in such an answer."""
        calls = self.calls
        has_calls = calls is not None and (calls.is_whole or bool(self.use.allowed))
        thoughts = () if self.thoughts is None else self.thoughts.kept_tokens
        return (*(calls.kept_tokens if calls is not None and has_calls else ()), *thoughts)


class TextParts:
    """Reads an answer whose text is made already, marks included."""

    stopped_by = ""

    def __init__(self, forms: Forms) -> None:
        self._parser = forms.parser(ContentStops())

    def read(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[Delta]:
        """The deltas that further text makes certain. token_ids: not looked at."""
        deltas = self._parser.feed(text)
        return [*deltas, *self._parser.finish()] if is_last else deltas


class AnswerParts:
    """Takes tokens one by one, and says which one completes a stop string in the content.

    Special tokens that are marks stay in the text that is parsed. A stop string in a thought, in a
    mark or in the arguments of a call does not count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        detokenizer: Detokenizer,
        prompt_token_ids: Sequence[int],
        forms: Forms,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_length: int = 0,
    ) -> None:
        """min_length: tokens below which no stop string counts. include_stop: see AnswerText."""
        self._tokenizer = tokenizer
        self._stream = detokenizer.literal.stream(prompt_token_ids)  # marks written out
        self._kept: Collection[int | None] = frozenset(map(tokenizer.token_to_id, forms.marks))
        self._stops = ContentStops(stop, include_stop)
        self._parser = forms.parser(self._stops)
        self._min_length = min_length
        self._num_tokens = 0
        self._has_ended = False
        self._deltas: list[Delta] = []
        self._content: list[str] = []
        self._num_taken = 0

    def append(self, token_id: int, may_stop: bool = True, is_last: bool = False) -> bool:
        """Whether the token completes a stop string of the content, which then ends the answer.

        may_stop, is_last: as AnswerText has them.
        """
        self._num_tokens += 1
        self._stops.may_stop = may_stop
        if self._is_shown(token_id):
            self._feed(self._stream.append((token_id,)))
        if is_last:
            self.finish()
        return self._stops.has_stopped

    def read(self, text: str, token_ids: Sequence[int], is_last: bool) -> list[Delta]:
        """The deltas that further tokens make certain. text: not looked at."""
        for token_id in token_ids:
            self.append(token_id, self._num_tokens >= self._min_length)
        if is_last:
            self.finish()
        deltas, self._deltas = self._deltas, []
        return deltas

    def finish(self) -> None:
        """Ends the answer where it is."""
        if not self._has_ended:
            self._has_ended = True
            self._feed(self._stream.finish())
            self._put(self._parser.finish())

    @property
    def stopped_by(self) -> str:
        """The stop string that has ended the content; "" where none has."""
        return self._stops.stopped_by

    @property
    def text(self) -> str:
        """The content so far."""
        return "".join(self._content)

    def take(self) -> str:
        """The content that became certain since the last call."""
        new = "".join(self._content[self._num_taken :])
        self._num_taken = len(self._content)
        return new

    def _feed(self, text: str) -> None:
        if text:
            self._put(self._parser.feed(text))

    def _put(self, deltas: list[Delta]) -> None:
        self._deltas += deltas
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content.append(delta.text)
            elif isinstance(delta, ThoughtEnd):
                self._content, self._num_taken = [], 0

    def _is_shown(self, token_id: int) -> bool:
        """Whether a token is a mark, has a text, or is a part of a character."""
        if token_id in self._kept or self._tokenizer.decode([token_id]):
            return True
        return not self._tokenizer.decode([token_id], False)
