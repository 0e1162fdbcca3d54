"""The text of one request as its tokens come, up to its first stop string."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from predict.text.detokenizer import TextStream
from predict.text.stop_strings import ROOT, Match, stop_strings

NO_TEXTS: Mapping[int, str] = MappingProxyType({})


class AnswerText:
    """Takes tokens one by one, and says which one completes a stop string.

    The text ends at the stop string that is complete first, the longest of those, however the text
    was cut into tokens. Text that may become one is held back from `take`. Without stop strings
    text is made when it is read, as a device may be waiting for the caller of `append`.
    """

    def __init__(
        self,
        stream: TextStream,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        hidden: Mapping[int, str] = NO_TEXTS,
    ):
        """include_stop: whether the text ends behind the stop string, not before it.

        hidden: texts of tokens that the text leaves out, and that stop strings have.
        """
        self._stream = stream
        self._stops = stop_strings(stop)
        self._stops_at_all = bool(stop)
        self._late: list[int] = []  # tokens that are no text yet
        self._has_ended = False
        self._include_stop = include_stop
        self._hidden = hidden
        # Characters of the certain text ahead of each hidden text so far, and that text's own.
        self._places: list[tuple[int, int]] = []
        self._node = ROOT  # of the stop strings, behind the certain text
        self._num_certain = 0  # characters that no later token can change
        self._num_exempt = 0  # characters, from the first, in which no match may end
        self._unsent = ""  # certain, not taken yet
        self._num_sent = 0
        self._text: str | None = None

    @property
    def text(self) -> str:
        """The text so far; up to its end once that is known."""
        self._catch_up()
        return self._stream.text if self._text is None else self._text

    def append(self, token_id: int, may_stop: bool = True, is_last: bool = False) -> bool:
        """Whether the token completes a stop string, which then ends the text.

        may_stop: False below min_length: strings that are complete then do not count. is_last: the
        request ends with this token in any case.
        """
        if self._stops_at_all:
            return self._append(token_id, may_stop, is_last)
        self._late.append(token_id)
        self._has_ended = is_last
        return False

    def _catch_up(self) -> None:
        late, self._late = self._late, []
        for index, token_id in enumerate(late, 1):
            self._append(token_id, True, self._has_ended and index == len(late))

    def _append(self, token_id: int, may_stop: bool, is_last: bool) -> bool:
        piece = self._stream.append((token_id,))
        pending = self._stream.pending
        if is_last:
            piece, pending = piece + self._stream.finish(), ""
        start = self._num_certain
        if not may_stop:
            self._num_exempt = start + len(piece) + len(pending)
        first = self._num_exempt - start
        node, match = self._stops.scan(self._node, piece, first)
        if match is None and pending:
            # Were this the last token, this would be its text.
            _, match = self._stops.scan(node, pending, first - len(piece))
            if match is not None:
                match = Match(match.begin + len(piece), match.end + len(piece))
        self._num_certain += len(piece)
        self._unsent += piece
        end = 0 if match is None else start + match.end
        hidden = self._hidden.get(token_id)
        if match is None and hidden:
            end = self._num_certain
            self._places.append((end, len(hidden)))
            node, match = self._stops.scan(node, hidden, 0 if may_stop else len(hidden))
        self._node = node
        if match is not None:
            if not self._include_stop:
                end = self._begin(end, match.end - match.begin)
            self._text = (self._stream.text + pending)[:end]
        elif is_last:
            self._text = self._stream.text
        return match is not None

    def _begin(self, end: int, length: int) -> int:
        """Where text begins that ends at `end` and is `length` long with the hidden texts in it."""
        for place, size in reversed(self._places):
            if length <= end - place:
                break
            length, end = max(length - (end - place) - size, 0), place
        return end - length

    def finish(self) -> None:
        """Ends the text where it is, unless a stop string has ended it."""
        self._catch_up()
        if self._text is None:
            self._stream.finish()
            self._text = self._stream.text

    def take(self) -> str:
        """The text that became certain since the last call."""
        self._catch_up()
        if self._text is not None:
            piece = self._text[self._num_sent :]
        else:
            held = self._num_certain - self._begin(self._num_certain, self._stops.depth(self._node))
            end = len(self._unsent) - held
            piece, self._unsent = self._unsent[:end], self._unsent[end:]
        self._num_sent += len(piece)
        return piece
