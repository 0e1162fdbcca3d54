"""How many drafts a request may have: more while they are right, none for a while if they fail."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_REST = 64  # steps
LONGEST_MISS = 8


@dataclass
class _State:
    length: int  # drafts to ask for
    rest: int = 0  # steps until the next try
    next_rest: int = 1
    next_miss: int = 1


class DraftPolicy:
    """PaddleNLP's rule for the length, and a rest after drafts of which none was right.

    All accepted: two more. Else one less, at least one. After a step in which no draft was right
    the length is halved and the request rests; twice as long each time in a row, so that text
    without repetition costs next to nothing. In a batch the rows of all drafts together are bounded
    by `max_step_tokens`: beyond that a step costs more than it saves.
    """

    def __init__(self, max_length: int, max_step_tokens: int):
        """max_length: drafts of one request. max_step_tokens: rows that a step has for free."""
        self.max_length = max_length
        self.max_step_tokens = max_step_tokens
        self._states: dict[int, _State] = {}

    def is_resting(self, request_id: int) -> bool:
        """Whether the request has no drafts in the next step."""
        state = self._states.get(request_id)
        return state is not None and state.rest > 0

    def rested(self, request_id: int) -> None:
        """Counts a step that the request was in; nothing unless it rests."""
        state = self._states.get(request_id)
        if state is not None and state.rest > 0:
            state.rest -= 1

    def length(self, request_id: int, num_requests: int) -> int:
        """Drafts to ask for, in a step with so many decoding requests."""
        share = max(self.max_step_tokens // max(num_requests, 1) - 1, 0)
        state = self._states.setdefault(request_id, _State(self.max_length))
        return min(state.length, share)

    def missed(self, request_id: int) -> None:
        """The request had no draft to try: it rests, a little longer each time in a row.

        For engines that run ahead, which a request that may have drafts stops.
        """
        state = self._states.setdefault(request_id, _State(self.max_length))
        state.rest = state.next_miss + 1  # the step that it has none in is counted too
        state.next_miss = min(2 * state.next_miss, LONGEST_MISS)

    def record(self, request_id: int, num_drafts: int, num_accepted: int) -> None:
        """The outcome of a step with drafts."""
        state = self._states.setdefault(request_id, _State(self.max_length))
        state.next_miss = 1
        if num_accepted == num_drafts:
            state.length = min(state.length + 2, self.max_length)
        else:
            state.length = max(state.length - 1, 1)
        if num_accepted:
            state.next_rest = 1
        else:
            state.length = max(state.length // 2, 1)
            state.rest = state.next_rest
            state.next_rest = min(2 * state.next_rest, LONGEST_REST)

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        self._states.pop(request_id, None)
