"""Answers of /v1/responses that later requests may name: in memory, the latest, apart by key."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from predict.server.errors import ApiError

# That an entry and an event take in memory besides their JSON.
ENTRY_BYTES, EVENT_BYTES = 2560, 64


@dataclass
class Entry:
    """A response, the conversation ahead of it, and what its stream has said. JSON, as it counts.

    task: makes the answer of a background response, until it is done.
    """

    owner: bytes
    id: str
    response: bytes
    items: bytes  # a list: all input of the conversation, earlier answers among it
    events: list[bytes] | None = None  # None where nobody may ask for them
    task: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)  # set: the answer is ended
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # set with each change
    size: int = 0  # as the store counts it

    @property
    def is_running(self) -> bool:
        """Whether its answer is being made."""
        return self.task is not None and not self.task.done()

    def input_items(self) -> list[dict[str, Any]]:
        """The items of the conversation ahead of the answer."""
        items: list[dict[str, Any]] = msgspec.json.decode(self.items)
        return items

    def shown(self) -> dict[str, Any]:
        """The response."""
        response: dict[str, Any] = msgspec.json.decode(self.response)
        return response

    async def follow(self, first: int) -> AsyncIterator[bytes]:
        """The events from that one on, as they come, to the end of the answer."""
        assert self.events is not None
        while True:
            while first < len(self.events):
                yield self.events[first]
                first += 1
            if not self.is_running:
                return
            self.moved.clear()
            await self.moved.wait()


class Store:
    """Holds entries within a count and a number of bytes; those least lately asked for go first.

    What an entry that runs takes is counted as it grows. Such a one does not go for others: where
    it fits no more, it is ended. One event loop's.
    """

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[bytes, str], Entry] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def is_open(self) -> bool:
        """Whether anything is kept."""
        return self._max_count > 0

    def put(self, entry: Entry) -> bool:
        """Whether an entry is kept from now on: it may be too large, or all the others run."""
        self._entries[entry.owner, entry.id] = entry
        self.measure(entry)
        return (entry.owner, entry.id) in self._entries

    def find(self, owner: bytes, response_id: str, param: str = "response_id") -> Entry:
        """An entry of this owner, which becomes the latest. Raises ApiError 404."""
        found = self._entries.get((owner, response_id))
        if found is None:
            raise ApiError(
                404,
                f"{param} {response_id[:80]!r} is not here: it was not stored, was deleted, or "
                "gave way to later ones; send the conversation itself",
                param=param,
                code="response_not_found",
            )
        self._entries.move_to_end((owner, response_id))
        return found

    def remove(self, entry: Entry) -> None:
        """Forgets an entry, and ends its answer."""
        if self._entries.pop((entry.owner, entry.id), None) is not None:
            self.num_bytes -= entry.size
            entry.size = 0
        entry.gone.set()

    def measure(self, entry: Entry, event: bytes | None = None) -> None:
        """Counts a changed entry anew, or its new event; others, or it itself, give way."""
        if (entry.owner, entry.id) not in self._entries:
            return
        entry.moved.set()
        if event is not None:
            more = EVENT_BYTES + len(event)
        else:
            events = sum(EVENT_BYTES + len(each) for each in entry.events or ())
            more = ENTRY_BYTES + len(entry.response) + len(entry.items) + events - entry.size
        entry.size += more
        self.num_bytes += more
        while len(self._entries) > self._max_count or self.num_bytes > self._max_bytes:
            idle = (each for each in self if each is not entry and not each.is_running)
            self.remove(next(idle, entry))
