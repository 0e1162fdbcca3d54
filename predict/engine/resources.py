"""What running requests hold: cache blocks, pages of adapters, tuned prefixes. Imports no Paddle.

The scheduler asks each resource in turn whether a waiting request has room, and then reserves in
all of them. Nothing in here reads a file: an adapter that is not in memory is fetched ahead, and
its request waits for it as it waits for blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from predict.adapters.pool import AdapterPool
from predict.adapters.prefixes import ServedPrefix, prefix_in
from predict.engine.block_manager import BlockManager, Suits, num_blocks_for
from predict.engine.picture_rows import PictureRows
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import SchedulerConfig
from predict.errors import UserError


class Need(NamedTuple):
    """What a waiting request needs to run."""

    request: Request
    shared: list[int]  # blocks that it begins with: its prefix's, and cached ones of its prompt
    num_cached: int  # tokens of its own in them
    num_blocks: int  # with the shared ones
    num_spare: int  # free blocks to leave to those that run


class Resource(Protocol):
    """Something that requests hold from their admission until they end or are preempted."""

    def has_room(self, need: Need) -> bool:
        """Whether `reserve` would succeed; changes nothing."""

    def reserve(self, need: Need) -> None:
        """Takes what is needed. Raises, with nothing taken, where that cannot be had at all."""

    def release(self, request: Request) -> None:
        """Gives back what a running request holds."""

    def check(self, requests: Collection[Request]) -> None:
        """Raises RuntimeError unless the unfinished `requests` hold what is taken, and no more."""


class CacheBlocks:
    """The cache's blocks, by requests; of a beam search with all its beams."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.manager = BlockManager(
            *(config.num_blocks, config.block_size, config.prefix_caching),
            *(config.cache_salt, config.lookahead),
        )
        self.suits: Suits | None = None  # of blocks that a request without a tuned prefix matches
        self.pinned: set[int] = set()  # of tuned prefixes
        # (from, to), planned and not in a batch yet: their blocks are in tables already.
        self.copies: list[tuple[int, int]] = []

    @property
    def num_unpinned(self) -> int:
        """Blocks that requests may have."""
        return self.config.num_blocks - len(self.pinned)

    def needed(self, request: Request, num_tokens: int) -> int:
        """Blocks of a request with `num_tokens` tokens, its prefix's blocks included."""
        return num_blocks_for(request.prefix.num_reserved + num_tokens, self.config.block_size)

    def cached(self, request: Request) -> tuple[list[int], int]:
        """Blocks that hold a waiting request's beginning, and the tokens of its own in them."""
        prefix = request.prefix
        if not request.shares_blocks or request.wants_prompt_logits:
            return list(prefix.block_ids), 0
        found, num_tokens = self.manager.match_prefix(
            *(request.contents, request.block_digests, request.block_salt, prefix.num_partial),
            *(None if prefix.num_tokens else self.suits,),
        )
        return [*prefix.block_ids, *found], num_tokens

    def has_room(self, need: Need) -> bool:
        """See Resource."""
        num_new = need.num_blocks - len(need.shared) + need.num_spare
        return self.manager.can_allocate(num_new, need.shared)

    def reserve(self, need: Need) -> None:
        """See Resource. A search keeps what it has beyond its prompt's blocks for its beams."""
        request, shared, prefix = need.request, need.shared, need.request.prefix
        self.manager.acquire(shared)
        request.block_ids = shared + self.manager.allocate(need.num_blocks - len(shared))
        if prefix.partial is not None and len(shared) == len(prefix.block_ids):
            self.copies.append((prefix.partial, request.block_ids[len(shared)]))
        if request.beam_group is not None:
            num_own = self.needed(request, len(request.token_ids))
            request.beam_group.spare_block_ids = request.block_ids[num_own:]
            del request.block_ids[num_own:]
        request.num_published_blocks = len(shared)

    def release(self, request: Request) -> None:
        """See Resource. A search is left without beams."""
        group = request.beam_group
        if group is None:
            self._free(request)
            return
        for beam in group.beams:
            self.drop(beam)
        self.manager.free(group.spare_block_ids)
        group.spare_block_ids = []

    def drop(self, beam: Request) -> None:
        """Ends a beam."""
        self._free(beam)
        if beam is not beam.owner:
            beam.status = RequestStatus.FINISHED

    def _free(self, request: Request) -> None:
        self.manager.free(request.block_ids)
        # A new list: spans of the step in flight still refer to the old one.
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_published_blocks = 0

    def check(self, requests: Collection[Request]) -> None:
        """See Resource."""
        held = Counter(self.pinned)
        for request in requests:
            group, runs = request.beam_group, request.status is RequestStatus.RUNNING
            own = [request] if group is None else group.beams
            for each in own:
                held.update(each.block_ids)
            held.update([] if group is None else group.spare_block_ids)
            if not runs and any(each.block_ids for each in own):
                raise RuntimeError(f"{request!r} waits and has blocks")
        self.manager.check(held)

    def publish(self, request: Request, num_computed: int) -> None:
        """Lets others match the blocks that `num_computed` tokens, all known, fill.

        Those whose lookahead is not known yet come later.
        """
        block_size, prefix = self.config.block_size, request.prefix
        num_computed = min(num_computed, request.num_known_tokens - self.config.lookahead)
        num_full = (prefix.num_tokens + num_computed) // block_size
        if request.shares_blocks:
            first_own = len(prefix.block_ids)
            self.manager.publish(
                request.block_ids[first_own:] if first_own else request.block_ids,
                request.contents,
                request.block_digests,
                request.num_published_blocks - first_own,
                num_full - first_own,
                request.block_salt,
                prefix.num_partial,
                None if prefix.num_tokens else self.suits,
            )
        request.num_published_blocks = num_full

    def digest(self, request: Request, num_blocks: int) -> bytes:
        """The digest of the first blocks of a request without a tuned prefix."""
        own = request.contents, request.block_digests
        return self.manager.digest(*own, num_blocks, request.block_salt)

    def lengthen(self, request: Request, num_drafts: int) -> int:
        """Takes free blocks for drafts behind a request's tokens; how many drafts have room."""
        num_tokens = len(request.token_ids)
        missing = self.needed(request, num_tokens + num_drafts) - len(request.block_ids)
        if missing <= 0:
            return num_drafts
        request.block_ids += self.manager.allocate(min(missing, self.manager.num_free_blocks))
        room = len(request.block_ids) * self.config.block_size - request.prefix.num_reserved
        return min(num_drafts, room - num_tokens)

    def trim(self, request: Request) -> None:
        """Frees the blocks that only rejected drafts needed."""
        if not self.config.reserve_full:
            num_blocks = self.needed(request, len(request.token_ids))
            self.manager.free(request.block_ids[num_blocks:])
            del request.block_ids[num_blocks:]


class AdapterPages:
    """The pages of adapters on the device; an adapter is held as long as a request with it runs."""

    def __init__(self, pool: AdapterPool | None) -> None:
        self.pool = pool

    def check_fits(self, request: Request) -> None:
        """Raises UserError for a request whose adapter can never be loaded."""
        adapter, pool = request.adapter, self.pool
        most = 0 if pool is None else min(pool.num_pages, pool.max_pages)
        if adapter is not None and adapter.num_pages > most:
            raise UserError(
                f"request {request.request_id}: its adapter {adapter.name} has "
                f"{adapter.num_pages} pages (allowed: up to {most}); raise --max_lora_rank"
            )

    def fetch(self, request: Request) -> Future[Any] | None:
        """Begins to read its adapter where no memory has it; None: nothing to wait for."""
        if self.pool is None or request.adapter is None:
            return None
        return self.pool.fetch(request.adapter)

    def has_room(self, need: Need) -> bool:
        """See Resource. There is none for an adapter that is still being fetched."""
        adapter = need.request.adapter
        return self.pool is None or adapter is None or self.pool.has_room(adapter)

    def reserve(self, need: Need) -> None:
        """See Resource. Raises what reading or writing the adapter raises."""
        if self.pool is not None and need.request.adapter is not None:
            self.pool.hold(need.request.adapter)

    def release(self, request: Request) -> None:
        """See Resource."""
        if self.pool is not None and request.adapter is not None:
            self.pool.release(request.adapter)

    def check(self, requests: Collection[Request]) -> None:
        """See Resource."""
        running = (each for each in requests if each.status is RequestStatus.RUNNING)
        if self.pool is not None:
            self.pool.check(Counter(each.adapter for each in running if each.adapter))


class PictureRoom:
    """Rows of pictures, held until a request has read them."""

    def __init__(self, rows: PictureRows | None) -> None:
        self.rows = rows

    def has_room(self, need: Need) -> bool:
        """See Resource."""
        return self.rows is None or self.rows.has_room(need.request, need.num_cached)

    def reserve(self, need: Need) -> None:
        """See Resource."""
        if self.rows is not None:
            self.rows.hold(need.request, need.num_cached)

    def release(self, request: Request) -> None:
        """See Resource."""
        if self.rows is not None:
            self.rows.release(request)

    def check(self, requests: Collection[Request]) -> None:
        """See Resource."""
        if self.rows is not None:
            self.rows.check(requests)


class Prefixes:
    """Tuned prefixes in pinned blocks, which stay until the last request that was added with one.

    A waiting request has its prefix already, so that there is always room.
    """

    def __init__(self, blocks: CacheBlocks) -> None:
        self._blocks = blocks
        self._holders: dict[ServedPrefix, int] = {}  # unfinished requests with each
        self._leaving: set[ServedPrefix] = set()  # of these: that no more requests may have

    def pin(self, name: str, num_tokens: int, most: int | None) -> ServedPrefix:
        """See Scheduler.pin_prefix. most: blocks that must be left for a request; None: one."""
        config, manager = self._blocks.config, self._blocks.manager
        free = manager.num_free_blocks
        num_blocks = num_blocks_for(num_tokens, config.block_size)
        if num_blocks >= free:
            raise UserError(
                f"prefix {name or 'of prefix_path'} has {num_tokens} tokens, which take "
                f"{num_blocks} blocks of {config.block_size} tokens, and the cache has {free} free "
                f"ones (allowed: up to {free - 1}); raise num_cache_blocks"
            )
        left = self._blocks.num_unpinned - num_blocks
        if most is not None and most > left:
            raise UserError(
                f"prefix {name} has {num_tokens} tokens, which take {num_blocks} blocks of "
                f"{config.block_size} tokens and leave {left}, and a request may need {most}; "
                "unload another prefix, or raise num_cache_blocks"
            )
        block_ids = manager.allocate(num_blocks)
        prefix = prefix_in(name, num_tokens, block_ids, config.block_size, config.for_drafts)
        self._holders[prefix] = 0
        self._blocks.pinned.update(block_ids)
        return prefix

    def unpin(self, prefix: ServedPrefix) -> None:
        """Gives up a prefix; its blocks are freed when its last request ends."""
        self._leaving.add(prefix)
        self._free_unused(prefix)

    def check_known(self, request: Request) -> None:
        """Raises UserError for a request whose prefix is gone."""
        prefix = request.prefix
        if prefix.num_tokens and (prefix not in self._holders or prefix in self._leaving):
            raise UserError(
                f"request {request.request_id}: its prefix {prefix.name} was unloaded before the "
                "request was queued; name another one"
            )

    def reserve(self, request: Request) -> None:
        """Keeps the prefix of a request that was added."""
        if request.prefix.num_tokens:
            self._holders[request.prefix] += 1

    def release(self, request: Request) -> None:
        """Ends that, with the request."""
        if request.prefix.num_tokens:
            self._holders[request.prefix] -= 1
            self._free_unused(request.prefix)

    def check(self, requests: Collection[Request]) -> None:
        """See Resource."""
        having = Counter(request.prefix for request in requests)
        if any(having[prefix] != count for prefix, count in self._holders.items()):
            raise RuntimeError("prefixes are not held by those who have them")
        blocks = [block for prefix in self._holders for block in prefix.all_block_ids]
        if sorted(blocks) != sorted(self._blocks.pinned):
            raise RuntimeError(f"prefixes fill {len(blocks)} blocks, not those that are pinned")

    def _free_unused(self, prefix: ServedPrefix) -> None:
        if prefix in self._leaving and not self._holders[prefix]:
            self._leaving.remove(prefix)
            del self._holders[prefix]
            self._blocks.manager.free(prefix.all_block_ids)
            self._blocks.pinned.difference_update(prefix.all_block_ids)
