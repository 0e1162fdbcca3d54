"""Which replica answers a prompt: the one that has its first block in the cache, if any has.

Prompts with the same first cache block go to the same replica, because nothing of a cache can be
shared otherwise. Which one that is needs no memory: every front ranks the replicas by a hash of
block and replica (rendezvous hashing), so all fronts agree, and a replica that comes or goes moves
its own share of the blocks alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


def key_of(prompt_token_ids: Sequence[int], block_size: int) -> bytes:
    """What prompts with the same first block have in common; short ones count whole."""
    first = array("q", prompt_token_ids[:block_size])
    return hashlib.blake2b(first.tobytes(), digest_size=16).digest()


def preference(key: bytes, replicas: Sequence[str]) -> list[int]:
    """Places of the replicas, the one that a key belongs to first, then those that stand in."""

    def weight(place: int) -> bytes:
        return hashlib.blake2b(key + replicas[place].encode(), digest_size=8).digest()

    return sorted(range(len(replicas)), key=weight)


class FirstBlockRouter(RequestRouter):
    """Sends a request, whose first argument is its key, to the replica that the key belongs to.

    When that one's batch is full, the next in the key's order with room takes it; when all are, the
    one with the fewest requests.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Takes `room`: requests of a replica below which a further one runs at once."""
        self._room: int = settings["room"]

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas to try, in this order."""
        key = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(key, bytes):
            return [candidate_replicas]
        names = [each.replica_id.unique_id for each in candidate_replicas]
        ranked = [candidate_replicas[place] for place in preference(key, names)]
        return [*([each] for each in ranked if self._has_room(each)), candidate_replicas]

    def _has_room(self, replica: RunningReplica) -> bool:
        num_requests = self.replica_queue_len_cache.get(replica.replica_id)
        return num_requests is None or num_requests < self._room
