"""The requests that a server is answering, and whether it drains."""

from __future__ import annotations

import asyncio


class Lifecycle:
    """Counts the requests that are being answered. Not thread-safe.

    Each request enters first and leaves after its last byte, whether or not it failed.
    """

    def __init__(self) -> None:
        self.draining = False  # new requests are refused with 503, running ones are finished
        self.num_requests = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """Counts a request."""
        self.num_requests += 1
        self._idle.clear()

    def leave(self) -> None:
        """Stops counting it."""
        self.num_requests -= 1
        if not self.num_requests:
            self._idle.set()

    def drain(self) -> None:
        """Refuses new requests from now on."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Returns once no request is being answered."""
        await self._idle.wait()
