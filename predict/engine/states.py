"""States of requests, for networks whose layers keep one beside the paged cache. Imports no Paddle.

A state of all layers fills a slot, and is what a request is behind some number of its tokens. A
step reads a request's slot `src` and writes another one, `dst`: what was before it stays until it
has run, so that a step may run again. No slot is written that another request reads, so that beams
share one, and a prompt begins with one that another prompt left behind, without a copy.

What a prompt leaves behind ("kept") is known by the digest of the cache's blocks up to there: after
its largest multiple of a stride that leaves a token to compute, after its end where that is such a
multiple, and where it parts from another prompt whose keys and values the cache has. An answer
leaves one behind at its last multiple of the stride so far, in place of the one before. A hit needs
keys and values up to a place, and a state at that very place.

Each running sequence needs two slots at most, of which there are as many; all others, and those
that are free at a time, are for kept states, and the one that was used longest ago makes room.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Collection

from predict.engine.request_state import Request, RequestStatus
from predict.engine.resources import CacheBlocks, Need
from predict.engine.scheduled import STRIDE, ScheduledSpan
from predict.engine.stats import EngineStats


class StateSlots:
    """The slots, by requests; of a beam search with all its beams. See Resource."""

    def __init__(self, blocks: CacheBlocks, stats: EngineStats) -> None:
        self._blocks, self._config, self._stats = blocks, blocks.config, stats
        count = blocks.config.num_state_slots
        self._num_holders = [0] * count  # of each slot: requests, and _kept
        self._free = list(range(count - 1, -1, -1))
        self._kept: OrderedDict[bytes, int] = OrderedDict()  # slots, used longest ago first
        # By request: states whose tokens, or what a digest has behind them, a step that runs will
        # tell, as the slot and the tokens before it; and what was kept of its answer last.
        self._untold: dict[int, tuple[int, int]] = {}
        self._kept_of: dict[int, bytes] = {}
        stats.num_state_slots = count
        self._stride = math.lcm(STRIDE, blocks.config.block_size)

    @property
    def is_there(self) -> bool:
        """Whether the network has states."""
        return bool(self._num_holders)

    @property
    def num_kept(self) -> int:
        """States that prompts have left behind."""
        return len(self._kept)

    def matched(
        self, request: Request, shared: list[int], num_cached: int
    ) -> tuple[list[int], int]:
        """Of a prompt's cached blocks those up to the last kept state, and the tokens in them.

        Sets where the request leaves states behind.
        """
        config, size = self._config, self._config.block_size
        request.state_ends, request.num_stateless_tokens = (), 0
        if not (self.is_there and config.prefix_caching and request.shares_blocks):
            return shared, num_cached
        digests, found = request.block_digests, num_cached // size
        while found and digests[found - 1] not in self._kept:
            found -= 1
        request.num_stateless_tokens = num_cached - found * size
        last = request.num_prompt_tokens - 1
        ends = {each // self._stride * self._stride for each in (last, last + 1, num_cached)}
        if config.chunked_prefill:
            request.state_ends = tuple(sorted(end for end in ends if end > found * size))
        return shared[:found], found * size

    def has_room(self, need: Need) -> bool:
        """See Resource: there are two slots for each sequence of the batch."""
        return True

    def reserve(self, need: Need) -> None:
        """See Resource. A request begins with the kept state behind its cached tokens."""
        request, num_blocks = need.request, need.num_cached // self._config.block_size
        if request.first_scheduled_time is None:  # as hits are counted
            self._stats.num_stateless_tokens += request.num_stateless_tokens
        if not self.is_there or not num_blocks:
            return
        digest = request.block_digests[num_blocks - 1]
        request.state_slot = self._kept[digest]
        self._kept.move_to_end(digest)
        self._num_holders[request.state_slot] += 1

    def release(self, request: Request) -> None:
        """See Resource."""
        group = request.beam_group
        for each in [request] if group is None else group.beams:
            self.drop(each)
        self._drop_untold(request.request_id)
        self._kept_of.pop(request.request_id, None)
        self._count()

    def drop(self, request: Request) -> None:
        """Gives back the slots of a request, or of one beam."""
        for slot in (request.state_slot, request.next_state_slot):
            self._give_back(slot)
        request.state_slot = request.next_state_slot = -1

    def share(self, beam: Request) -> None:
        """Lets a forked beam hold the state that it has of another one."""
        if beam.state_slot >= 0:
            self._num_holders[beam.state_slot] += 1

    def assigned(self, spans: list[ScheduledSpan]) -> list[ScheduledSpan]:
        """The spans of a step with the slots that they read and write."""
        if not self.is_there:
            return spans
        made = []
        for span in spans:
            request = span.request
            self._give_back(request.next_state_slot)  # of a step that never ran
            request.next_state_slot = self._take()
            made.append(span._replace(state=(request.state_slot, request.next_state_slot)))
        self._count()
        return made

    def written(self, span: ScheduledSpan, num_computed: int) -> int:
        """Makes the state behind a span its request's, which runs; the request's computed tokens.

        num_computed: tokens up to where the step stands, with accepted drafts. Where some were
        rejected the state before the span stays, and what follows is computed again.
        """
        request, (before, after) = span.request, span.state
        # Accepted drafts behind the last token are no part of the request.
        num_computed = min(num_computed, len(request.token_ids))
        if after < 0 or request.next_state_slot != after:
            return num_computed
        request.next_state_slot = -1
        if num_computed < span.start + span.num_tokens:
            self._give_back(after)
            return span.start
        self._give_back(before)
        request.state_slot = after
        shares = self._config.prefix_caching and request.shares_blocks
        if num_computed % self._stride or not shares:
            return num_computed
        is_end = num_computed in request.state_ends or num_computed == request.num_prompt_tokens
        if is_end and num_computed + self._config.lookahead <= request.num_known_tokens:
            self._keep(request, num_computed, after)
        elif is_end or (
            not self._config.same_bits  # GPUs round answers otherwise than prompts
            and num_computed > request.num_prompt_tokens
            and request.beam_group is None
        ):
            self._drop_untold(request.request_id)
            self._untold[request.request_id] = after, num_computed
            self._num_holders[after] += 1
        return num_computed

    def told(self, request: Request) -> None:
        """Keeps the state of an answer once its tokens, and what the digest has, are known."""
        slot, num_tokens = self._untold.get(request.request_id, (-1, 0))
        if slot < 0 or num_tokens + self._config.lookahead > request.num_known_tokens:
            return
        digest = self._keep(request, num_tokens, slot)
        self._drop_untold(request.request_id)
        if num_tokens <= request.num_prompt_tokens:
            return
        before = self._kept_of.get(request.request_id)
        self._kept_of[request.request_id] = digest
        if before is not None and before != digest and before in self._kept:
            self._give_back(self._kept.pop(before))

    def _keep(self, request: Request, num_tokens: int, slot: int) -> bytes:
        digest = self._blocks.digest(request, num_tokens // self._config.block_size)
        if digest not in self._kept:
            self._kept[digest] = slot
            self._num_holders[slot] += 1
        self._kept.move_to_end(digest)
        return digest

    def _drop_untold(self, request_id: int) -> None:
        self._give_back(self._untold.pop(request_id, (-1, 0))[0])

    def _count(self) -> None:
        """Tells how many slots are kept for prompts to come, and how many requests have."""
        self._stats.num_kept_states = len(self._kept)
        self._stats.num_used_states = (
            len(self._num_holders)
            - len(self._free)
            - sum(self._num_holders[slot] == 1 for slot in self._kept.values())
        )

    def _take(self) -> int:
        """A free slot; the kept state that was used longest ago, and no request reads, ends."""
        if not self._free:
            oldest = (d for d, slot in self._kept.items() if self._num_holders[slot] == 1)
            if (digest := next(oldest, None)) is not None:
                self._give_back(self._kept.pop(digest))
        while not self._free:
            self._drop_untold(next(iter(self._untold)))
        slot = self._free.pop()
        self._num_holders[slot] = 1
        return slot

    def forget_kept(self) -> None:
        """Forgets what prompts have left behind."""
        while self._kept:
            self._give_back(self._kept.popitem()[1])

    def _give_back(self, slot: int) -> None:
        if slot < 0:
            return
        self._num_holders[slot] -= 1
        if not self._num_holders[slot]:
            self._free.append(slot)

    def check(self, requests: Collection[Request]) -> None:
        """See Resource."""
        held = Counter([*self._kept.values(), *(slot for slot, _ in self._untold.values())])
        for request in requests:
            group = request.beam_group
            for each in [request] if group is None else group.beams:
                slots = [s for s in (each.state_slot, each.next_state_slot) if s >= 0]
                held.update(slots)
                if slots and request.status is not RequestStatus.RUNNING:
                    raise RuntimeError(f"{request!r} waits and has a state")
        if any(held[slot] != count for slot, count in enumerate(self._num_holders)):
            raise RuntimeError("slots of states are not held by those who have them")
        if sorted([*self._free, *(s for s in held if held[s])]) != [*range(len(self._num_holders))]:
            raise RuntimeError(f"{len(self._free)} free and {len(held)} used slots do not add up")
