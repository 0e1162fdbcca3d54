"""Rows of pictures in a table on the device, and which requests hold them. Imports no Paddle.

Requests hold rows from their admission until their last token of a picture is computed; what
nobody holds stays until its room is needed. A pass that encodes pictures keeps their rows, too.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from predict.engine.request_state import Request, RequestStatus
from predict.errors import UserError
from predict.images.placed import Picture


@dataclass(eq=False)
class HeldRows:
    """A picture's rows."""

    picture: Picture
    rows: npt.NDArray[np.int32]
    num_holders: int = 0
    is_encoded: bool = False
    in_pass: bool = False  # its rows are being made
    has_failed: bool = False  # in a pass with others: the step that reads it makes them


@dataclass(eq=False)
class PictureRows:
    """The rows of the table, and who holds them."""

    num_rows: int
    whole: bool = False  # a picture is read in one step: its tokens see each other
    waits: bool = False  # requests are read up to their first picture that is not encoded
    _free: list[int] = field(init=False)
    _of: dict[bytes, HeldRows] = field(default_factory=dict)
    _unheld: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # oldest first
    _holders: dict[Request, list[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._free = list(range(self.num_rows - 1, -1, -1))

    def check_fits(self, request: Request) -> None:
        """Raises UserError for a request whose pictures never have room together."""
        if request.pictures is not None and request.pictures.num_rows > self.num_rows:
            raise UserError(
                f"request {request.request_id}: its pictures have {request.pictures.num_rows} "
                f"rows (allowed: up to {self.num_rows} at once); make them smaller, or raise "
                "max_length"
            )

    def held(self, picture: Picture) -> HeldRows:
        """The rows of a picture that some request holds."""
        return self._of[picture.digest]

    def has_room(self, request: Request, num_cached: int) -> bool:
        """Whether `hold` would succeed. num_cached: leading tokens that are not computed again."""
        wanted = _wanted(request, num_cached)
        missing = sum(p.num_rows for digest, p in wanted.items() if digest not in self._of)
        left = sum(len(self._of[digest].rows) for digest in self._unheld if digest not in wanted)
        return missing <= len(self._free) + left

    def hold(self, request: Request, num_cached: int) -> None:
        """Keeps rows for the pictures that the request has yet to read."""
        wanted = _wanted(request, num_cached)
        if not wanted:
            return
        for digest in wanted:
            if digest in self._of:
                self._of[digest].num_holders += 1
                self._unheld.pop(digest, None)
        for digest, picture in wanted.items():
            if digest in self._of:
                continue
            count = picture.num_rows
            while len(self._free) < count:
                oldest, _ = self._unheld.popitem(last=False)
                self._free += self._of.pop(oldest).rows.tolist()
            rows = sorted(self._free.pop() for _ in range(count))
            self._of[digest] = HeldRows(picture, np.array(rows, np.int32), 1)
        self._holders[request] = list(wanted)

    def release(self, request: Request) -> None:
        """Gives back what a request holds, if anything."""
        for digest in self._holders.pop(request, ()):
            held = self._of[digest]
            held.num_holders -= 1
            if not held.num_holders and not held.in_pass:
                self._leave(held)

    def _leave(self, held: HeldRows) -> None:
        """Nobody holds these rows any more."""
        digest = held.picture.digest
        if held.is_encoded:
            self._unheld[digest] = None
        else:
            self._free += self._of.pop(digest).rows.tolist()

    def missing(self, first: Sequence[Picture] = ()) -> list[HeldRows]:
        """What is held and not encoded: of these pictures, then of others in order of arrival."""
        wanted = [each.digest for each in first]
        found = [self._of[digest] for digest in dict.fromkeys([*wanted, *self._of])]
        return [
            each
            for each in found
            if not (each.is_encoded or each.in_pass)
            and (each.picture.digest in wanted or not each.has_failed)
        ]

    def begin(self, held: Sequence[HeldRows]) -> None:
        """A pass encodes these pictures: their rows stay, whoever gives them back."""
        for each in held:
            each.in_pass = True

    def end(self, held: Sequence[HeldRows], is_encoded: bool) -> None:
        """The pass has ended, or failed."""
        for each in held:
            each.in_pass, each.is_encoded, each.has_failed = False, is_encoded, not is_encoded
            if not each.num_holders:
                self._leave(each)

    def num_readable(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of so many tokens from `start` on can be read now: see `waits`."""
        if not self.waits or request.pictures is None:
            return num_tokens
        for each in request.pictures.within(start, start + num_tokens):
            held = self._of.get(each.picture.digest)
            if held is None or not (held.is_encoded or held.has_failed):
                return max(each.start - start, 0)
        return num_tokens

    def check(self, requests: Collection[Request]) -> None:
        """Raises RuntimeError unless requests that run hold what is taken, and no rows are lost."""
        running = {r for r in requests if r.status is RequestStatus.RUNNING}
        if not self._holders.keys() <= running:
            raise RuntimeError("a request that does not run holds rows of pictures")
        held = Counter(digest for digests in self._holders.values() for digest in digests)
        if any(each.num_holders != held[digest] for digest, each in self._of.items()):
            raise RuntimeError("rows of pictures are not held by those who have them")
        alone = {d for d, each in self._of.items() if not (each.num_holders or each.in_pass)}
        if alone != self._unheld.keys():
            raise RuntimeError("rows of pictures that nobody holds are lost")
        rows = [*self._free, *(int(row) for each in self._of.values() for row in each.rows)]
        if sorted(rows) != list(range(self.num_rows)):
            raise RuntimeError(f"{len(rows)} rows of pictures, of {self.num_rows}")


def _wanted(request: Request, num_cached: int) -> dict[bytes, Picture]:
    """The pictures that the request has yet to read, by digest."""
    pictures = request.pictures
    if pictures is None:
        return {}
    left = pictures.within(num_cached, pictures.end)
    return {each.picture.digest: each.picture for each in left}
