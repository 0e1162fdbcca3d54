"""The text of one request as its tokens come, up to its first stop string."""

from __future__ import annotations

from predict.text.detokenizer import TextStream
from predict.text.stop_strings import ROOT, Match, stop_strings


class AnswerText:
    """Takes tokens one by one, and says which one completes a stop string.

    The text ends at the stop string that is complete first, the longest of those, however the text
    was cut into tokens. Text that may become one is held back from `take`. Without stop strings
    text is made when it is read, as a device may be waiting for the caller of `append`.
    """

    def __init__(self, stream: TextStream, stop: tuple[str, ...] = (), include_stop: bool = False):
        """include_stop: whether the text ends behind the stop string, not before it."""
        self._stream = stream
        self._stops = stop_strings(stop)
        self._stops_at_all = bool(stop)
        self._late: list[int] = []  # tokens that are no text yet
        self._has_ended = False
        self._include_stop = include_stop
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
        self._node = node
        self._num_certain += len(piece)
        self._unsent += piece
        if match is not None:
            end = start + (match.end if self._include_stop else match.begin)
            self._text = (self._stream.text + pending)[:end]
        elif is_last:
            self._text = self._stream.text
        return match is not None

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
            end = len(self._unsent) - self._stops.depth(self._node)
            piece, self._unsent = self._unsent[:end], self._unsent[end:]
        self._num_sent += len(piece)
        return piece
