"""The tools of parsers whose text comes in pieces, cut anywhere.

A parser is a generator over a `Reader` that yields where it needs more text, and gives its findings
to an `Output`. It is written as if all text were there. Each character is looked at a bounded
number of times, however the text is cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

from predict.text.deltas import (
    CallArguments,
    CallBegin,
    ContentDelta,
    Delta,
    ReasoningDelta,
)
from predict.text.stop_strings import ROOT, stop_strings

ScanResult = TypeVar("ScanResult")
Steps = Generator[None, None, ScanResult]  # yields where more text is needed
Emit = Callable[[str], None]

WINDOW = 1024  # characters
SPACES = re.compile(r"\s*")


@lru_cache(maxsize=64)
def _firsts(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Matches the first character of any mark."""
    return re.compile("|".join(sorted({re.escape(mark[0]) for mark in marks})) or r"(?!)")


class Reader:
    """Text that comes in pieces, and the position in it.

    Methods look ahead no farther than a mark is long, so little text is held unread.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._breaks_off = False  # the text ends within a mark that was asked for
        self._recorded: list[str] | None = None

    def add(self, text: str) -> None:
        """Appends a piece."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No piece follows."""
        self._has_ended = True

    def record(self) -> None:
        """Starts to record what is read, which may turn out to be no markup."""
        self._recorded = []

    def recorded(self) -> str:
        """The text read since `record`; ends the recording."""
        pieces, self._recorded = self._recorded or [], None
        return "".join(pieces)

    def rejected(self, mark: str = "") -> str:
        """A mark and what was read since `record`, which begins no call and so is content.

        "" where the text breaks off there: a header that is cut is no content.
        """
        text = mark + self.recorded()
        if not self._breaks_off and (self._at < len(self._text) or not self._has_ended):
            return text
        self.rest()
        return ""

    def take(self, count: int) -> str:
        """Reads the next characters, which must have come."""
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def unread(self, text: str) -> None:
        """Puts text in front of what is not read yet."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def rest(self) -> str:
        """Reads all text that has come."""
        return self.take(len(self._text) - self._at)

    def more(self) -> Steps[bool]:
        """Waits for more text; False when none comes."""
        size = len(self._text) - self._at
        while not self._has_ended:
            yield
            if len(self._text) - self._at > size:
                return True
        return False

    def peek(self) -> Steps[str]:
        """The next character, "" at the end of the text."""
        if self._at == len(self._text) and not (yield from self.more()):
            return ""
        return self._text[self._at]

    def matched(self, pattern: re.Pattern[str]) -> str:
        """Reads what a pattern matches in the text that has come."""
        match = pattern.match(self._text, self._at)
        return self.take(match.end() - self._at) if match else ""

    def run(self, pattern: re.Pattern[str], emit: Emit | None = None) -> Steps[str]:
        """Reads all characters that a pattern of the form [...]* takes; "" if they are emitted."""
        pieces = []
        while (yield from self.peek()):
            piece = self.matched(pattern)
            if not piece:
                break
            if emit is None:
                pieces.append(piece)
            else:
                emit(piece)
        return "".join(pieces)

    def spaces(self) -> Steps[str]:
        """Reads white space."""
        return (yield from self.run(SPACES))

    def literal(self, *marks: str) -> Steps[str | None]:
        """Reads the longest of the marks that comes next; None, with nothing read, without one."""
        while True:
            ahead = self._text[self._at : self._at + max(map(len, marks))]
            found = [mark for mark in marks if ahead.startswith(mark)]
            longer = any(len(mark) > len(ahead) and mark.startswith(ahead) for mark in marks)
            if longer and (yield from self.more()):
                continue
            if not found:
                self._breaks_off |= longer
                return None
            return self.take(len(max(found, key=len)))

    def until(self, marks: Sequence[str], emit: Emit) -> Steps[str | None]:
        """Emits the text before the first mark and reads the mark; None: the text ended.

        Text that may yet become a mark is held back.
        """
        finder = stop_strings(tuple(marks))
        has_first = _firsts(tuple(marks)).search
        node = ROOT
        held = ""
        while self._at < len(self._text) or (yield from self.more()):
            # A window, as it is copied for each mark, and a long text has many.
            text = self._text[self._at : self._at + WINDOW]
            if node == ROOT and not has_first(text):
                emit(self.take(len(text)))
                continue
            node, match = finder.scan(node, text)
            if match is not None:
                self.take(match.end)
                text = held + text
                begin, end = len(held) + match.begin, len(held) + match.end
                if begin:
                    emit(text[:begin])
                return text[begin:end]
            text = held + self.take(len(text))
            certain = len(text) - finder.depth(node)
            if certain:
                emit(text[:certain])
            held = text[certain:]
        if held:
            emit(held)
        return None


class ContentStops:
    """Ends an answer at the first stop string in its content, of those that may count."""

    def __init__(self, stop: tuple[str, ...] = (), include_stop: bool = False) -> None:
        """include_stop: whether the content ends behind the stop string, not before it."""
        self._stops = stop_strings(stop) if stop else None
        self._include_stop = include_stop
        self._node = ROOT
        self._held = ""  # may become a stop string
        self.may_stop = True  # whether strings that are complete from now on count
        self.has_stopped = False
        self.stopped_by = ""  # the stop string

    def take(self, text: str) -> str:
        """The content that is certain with this text; "" behind the end."""
        if self._stops is None:
            return text
        if self.has_stopped:
            return ""
        held, self._held = self._held, ""
        whole = held + text
        first = 0 if self.may_stop else len(text)
        self._node, match = self._stops.scan(self._node, text, first)
        if match is not None:
            self.has_stopped = True
            begin, end = len(held) + match.begin, len(held) + match.end
            self.stopped_by = whole[begin:end]
            return whole[: end if self._include_stop else begin]
        certain = len(whole) - self._stops.depth(self._node)
        self._held = whole[certain:]
        return whole[:certain]

    def flush(self) -> str:
        """The content that was held back, where something else follows, or nothing."""
        held, self._held, self._node = self._held, "", ROOT
        return held


class Output:
    """Collects the findings of a parser; neighbours of a kind become one delta.

    White space between content and a call, between calls, and behind them is kept only where more
    content follows.
    """

    def __init__(self, new_id: Callable[[], str], stops: ContentStops | None = None) -> None:
        self._new_id = new_id
        self._stops = stops or ContentStops()
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []  # of the last delta, which is not made yet
        self._make: Callable[[str], Delta] = ContentDelta
        self._spaces: list[str] = []  # behind content, or a call
        self._trims = False  # whether spaces are dropped when nothing follows
        self._thought_spaces: list[str] = []  # behind reasoning
        self._has_thoughts = False
        self._has_content = False
        self.num_calls = 0

    def content(self, text: str) -> None:
        """Text that is no markup."""
        self._put_content(self._stops.take(text))

    def _put_content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            if self._spaces:
                self._put(ContentDelta, "".join([*self._spaces, kept]))
                self._spaces = []
            else:
                self._put(ContentDelta, kept)
            self._trims = False
            self._has_content = True
        if len(kept) < len(text):
            self._spaces.append(text[len(kept) :])

    def reasoning(self, text: str) -> None:
        """Text of the model's thoughts, less the white space around it."""
        if self._stops.has_stopped:
            return
        kept = text.rstrip()
        if kept:
            whole = "".join([*self._thought_spaces, kept])
            self._thought_spaces = []
            self._put(ReasoningDelta, whole if self._has_thoughts else whole.lstrip())
            self._has_thoughts = True
        if len(kept) < len(text):
            self._thought_spaces.append(text[len(kept) :])

    def separate(self) -> None:
        """Starts new lines for the content and the reasoning that follow."""
        self._put_content(self._stops.flush())
        self._spaces = ["\n"] if self._has_content else []
        self._thought_spaces = ["\n"] if self._has_thoughts else []
        self._trims = True

    def trim(self) -> None:
        """Drops white space here, unless it stands amid content."""
        self._put_content(self._stops.flush())
        self._spaces = []
        self._trims = True

    def begin_call(self, name: str, given_id: str | None = None) -> None:
        """Begins a call, which the following arguments belong to."""
        if self._stops.has_stopped:
            return
        self.trim()
        self._close()
        self._deltas.append(CallBegin(self.num_calls, given_id or self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if text and not self._stops.has_stopped:
            self._put(self._arguments, text)

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        self._close()
        deltas, self._deltas = self._deltas, []
        return deltas

    def end(self) -> None:
        """Nothing follows."""
        self._put_content(self._stops.flush())
        if self._spaces and not self._trims:
            self._put(ContentDelta, "".join(self._spaces))
        self._spaces = []

    def _arguments(self, text: str) -> Delta:
        return CallArguments(self.num_calls - 1, text)

    def _put(self, make: Callable[[str], Delta], text: str) -> None:
        if self._pieces and make != self._make:
            self._close()
        self._make = make
        self._pieces.append(text)

    def _close(self) -> None:
        if self._pieces:
            self._deltas.append(self._make("".join(self._pieces)))
            self._pieces = []


class StepParser:
    """A `Parser` made of a generator: `steps(reader, output)` reads until the text ends."""

    def __init__(
        self,
        steps: Callable[[Reader, Output], Steps[None]],
        new_id: Callable[[], str],
        stops: ContentStops | None = None,
    ) -> None:
        self._reader = Reader()
        self._output = Output(new_id, stops)
        self._steps = steps(self._reader, self._output)
        next(self._steps)

    def feed(self, text: str) -> list[Delta]:
        """The deltas that this text makes certain."""
        if not text:
            return []
        self._reader.add(text)
        next(self._steps)
        return self._output.take()

    def finish(self) -> list[Delta]:
        """The deltas of the text that was held back."""
        self._reader.end()
        for _ in self._steps:
            raise AssertionError("a parser waits for text behind its end")
        self._output.end()
        return self._output.take()
