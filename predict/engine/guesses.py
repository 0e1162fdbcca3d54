"""What a look-up found for a request, held against the tokens that come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from predict.engine.request_state import Request

MANY_VAIN = 4  # look-ups in a row that found nothing right, before requests rest
LONGEST_REST = 12  # tokens until the next look-up


@dataclass
class Guess:
    """Tokens that a look-up found, and how it went with them."""

    token_ids: Sequence[int] = ()
    num_right: int = 0  # of these, that came
    num_seen: int = 0  # tokens of the request that were compared
    num_vain: int = 0  # look-ups in a row without a right token
    rest: int = 0  # tokens until the next one

    @property
    def is_wanted(self) -> bool:
        """Whether the request needs another look-up."""
        return not self.token_ids and self.rest <= 0

    def compared(self, request: Request) -> Iterator[tuple[int, bool]]:
        """Places that the request's new tokens reach, and whether each is right, one by one."""
        num_tokens = request.num_known_tokens
        new, self.num_seen = request.token_ids[self.num_seen : num_tokens], num_tokens
        for token in new if self.token_ids else ():
            right = token == self.token_ids[self.num_right]
            yield self.num_right, right
            self.num_right += right
            if not right or self.num_right == len(self.token_ids):
                self.put(())
                break
        self.rest -= len(new)

    def put(self, token_ids: Sequence[int]) -> None:
        """Stores new ones, in the place of those that are over; empty where there are none."""
        if not token_ids:
            self.num_vain = 0 if self.num_right else self.num_vain + 1
            self.rest = min(max(self.num_vain - MANY_VAIN, 0), LONGEST_REST)
        self.token_ids, self.num_right = token_ids, 0
