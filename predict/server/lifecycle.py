"""What a server is doing: loading, answering, finishing what it has, or dead."""

from __future__ import annotations

import asyncio


class Lifecycle:
    """Counts the requests that are being answered, and says when none is.

    Whoever answers a request enters first and leaves after its last byte, whatever became of it.
    One event loop's.
    """

    def __init__(self) -> None:
        self.draining = False  # new requests are refused with 503, those that run are finished
        self.num_requests = 0  # being answered
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request that is answered begins."""
        self.num_requests += 1
        self._idle.clear()

    def leave(self) -> None:
        """It ends."""
        self.num_requests -= 1
        if not self.num_requests:
            self._idle.set()

    def drain(self) -> None:
        """From now on new requests are refused."""
        self.draining = True

    async def wait_idle(self) -> None:
        """Returns once no request is being answered."""
        await self._idle.wait()
