"""The requests that wait for a place in the batch, and how they get one. Imports no Paddle."""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import islice
from typing import Any

from predict.adapters.pool import READ_AHEAD
from predict.engine.failures import RequestError
from predict.engine.picture_spans import uncut
from predict.engine.request_state import Request, RequestStatus
from predict.engine.resources import AdapterPages, CacheBlocks, Need, PictureRoom, Resource
from predict.engine.scheduled import STRIDE, ScheduledSpan, SchedulerConfig, prompt_span
from predict.engine.states import StateSlots
from predict.engine.stats import EngineStats

# Rows of logits for prompts' logprobs in a step: 128 MiB with a vocabulary of 128k.
MAX_PROMPT_LOGITS = 256
FEW_TOKENS = 8  # kFewTokens of csrc/cuda/states/delta_net.h


def chunk(
    config: SchedulerConfig,
    request: Request,
    start: int,
    budget: int,
    first: bool,
    spans: Sequence[ScheduledSpan],
) -> int:
    """Tokens of a prompt to run now; only the `first` whole prompt may exceed the budget.

    A prompt is cut where it leaves a state behind. One with logprobs always runs in chunks, since
    its logits take memory. A bidirectional prompt is never cut, nor is a picture whose tokens see
    each other; the tokens generated behind it before a preemption may be.
    """
    end = next((each for each in request.state_ends if each > start), len(request.token_ids))
    num_left = end - start
    over_budget = first and not config.chunked_prefill
    is_whole = start < request.num_prompt_tokens and not request.shares_blocks
    if config.pictures is not None:
        num_readable = config.pictures.num_readable(request, start, num_left)
        if num_readable < num_left and (is_whole or not config.chunked_prefill):
            return 0
        num_left = num_readable
    if is_whole and budget < request.num_prompt_tokens and not over_budget:
        return 0
    if request.wants_prompt_logits:
        num_left = min(num_left, budget)
        budget = MAX_PROMPT_LOGITS - sum(span.num_prompt_logits for span in spans)
    elif not config.chunked_prefill:
        budget = num_left if num_left <= budget or first else 0
    num_tokens = min(num_left, budget)
    if config.pictures is not None and config.pictures.whole:
        num_tokens = uncut(request, start, num_tokens)
    alike = config.same_bits and config.num_state_slots
    return _alike(request, start, num_tokens) if alike else num_tokens


def _alike(request: Request, start: int, num_tokens: int) -> int:
    """How many of the tokens give the same bits as in any other step.

    GPUs compute a prompt's states in chunks of STRIDE from its beginning, what is left of it, and
    the tokens behind it, one by one, up to FEW_TOKENS a step.
    """
    if start >= request.num_prompt_tokens:
        return min(num_tokens, FEW_TOKENS)
    end = start + num_tokens
    if end >= request.num_prompt_tokens:
        return request.num_prompt_tokens - start
    return max(end // STRIDE * STRIDE - start, 0)


def rank_of(request: Request) -> tuple[float, int]:
    """Its place in the order of all requests."""
    return request.rank


def waits_for_leader(request: Request, block_size: int) -> bool:
    """Whether its leader, with the same prompt, has yet to publish blocks of that prompt."""
    leader = request.leader
    if leader is None or leader.status is not RequestStatus.RUNNING:
        return False
    num_tokens = leader.prefix.num_tokens + leader.num_prompt_tokens
    return leader.num_published_blocks < (num_tokens - 1) // block_size


class Queue:
    """Waiting requests, in the order of rank."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: CacheBlocks,
        adapters: AdapterPages,
        stats: EngineStats,
    ) -> None:
        self.requests: deque[Request] = deque()
        self.states = StateSlots(blocks, stats)
        # In the order in which they reserve: what may fail comes first.
        pictures = PictureRoom(config.pictures)
        self.resources: tuple[Resource, ...] = (adapters, pictures, blocks, self.states)
        self._config, self._blocks, self._adapters, self._stats = config, blocks, adapters, stats
        self._awaited: Future[Any] | None = None  # what is read for the first request
        self.yields = False  # see Scheduler.make_room

    def fetch(self) -> None:
        """Begins to read the adapters that are needed next, while other requests run."""
        if self._adapters.pool is not None:
            found = [self._adapters.fetch(each) for each in islice(self.requests, READ_AHEAD)]
            self._awaited = found[0] if found else None

    def wait(self) -> bool:
        """Waits for the file that kept the first request waiting; False where none did."""
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            wait([awaited])
        return awaited is not None

    def put(self, request: Request) -> None:
        """Puts a request into its place, most often the last or the first one."""
        waiting = self.requests
        if not waiting or waiting[-1].rank < request.rank:
            waiting.append(request)
        else:
            waiting.insert(bisect_left(waiting, request.rank, key=rank_of), request)

    def release(self, request: Request) -> None:
        """Gives back what an added request holds, if it runs, and so its beams."""
        if request.status is RequestStatus.RUNNING:
            for resource in self.resources:
                resource.release(request)

    def admit(
        self, running: list[Request], budget: int, num_decodes: int, spans: list[ScheduledSpan]
    ) -> None:
        """Moves requests, in order, into the batch while sequences, budget and resources last.

        The first is tried in every step: much may make room for it, and nothing remembers that it
        had none. Raises RequestError, with the request in the queue and nothing of it reserved.
        """
        if self.yields and running:
            return
        self.fetch()
        # One free block stays for each running request that may still grow: otherwise the
        # newcomer would be preempted, and its prefill lost, within a few steps. A request that
        # is alone has the whole cache and needs none, so this delays but never starves.
        headroom = self._headroom(running)
        num_slots = self._num_slots(running)
        while self.requests and budget > 0:
            request = self.requests[0]
            num_slots -= request.num_slots
            if num_slots < 0 or self._waits_for_leader(request):
                return
            begun = len(spans)
            first = begun == num_decodes
            need = self._enter(running, headroom if running else None, budget, first, spans)
            if need is None:
                return
            headroom += request.num_slots * (need.num_blocks < request.max_num_blocks)
            budget -= sum(span.num_tokens for span in spans[begun:])

    def admit_ahead(
        self,
        running: list[Request],
        budget: int,
        spans: list[ScheduledSpan],
        preempt: Callable[[], object],
    ) -> bool:
        """Moves the first request into the batch, ahead of running ones; whether it did.

        preempt() takes the last running request out. It is called only while that is behind this
        one and a sequence, or something else that requests hold, is missing.
        """
        self.fetch()
        request = self.requests[0]
        if self.yields or self._awaited is not None or self._waits_for_leader(request):
            return False
        runs = chunk(self._config, request, 0, budget, not spans, spans)
        if budget < 1 or not (runs or self._waits_for_pictures(request, 0)):
            return False
        while True:
            ahead = running[: bisect_left(running, request.rank, key=rank_of)]
            if self._num_slots(running) >= request.num_slots:
                headroom = self._headroom(ahead) if running else None
                if self._enter(running, headroom, budget, not spans, spans) is not None:
                    return True
            if len(ahead) == len(running):
                return False
            preempt()

    def _headroom(self, running: Sequence[Request]) -> int:
        """Blocks that these requests may still need next."""
        if self._config.reserve_full:
            return 0
        return sum(r.num_slots * (len(r.block_ids) < r.max_num_blocks) for r in running)

    def _num_slots(self, running: Sequence[Request]) -> int:
        """Sequences that the batch has room for."""
        return self._config.max_num_seqs - sum(request.num_slots for request in running)

    def _enter(
        self,
        running: list[Request],
        headroom: int | None,
        budget: int,
        first: bool,
        spans: list[ScheduledSpan],
    ) -> Need | None:
        """Moves the first request into the batch; None: there is no room.

        Its span is the last one; it has none while it waits for a picture.
        """
        request = self.requests[0]
        try:
            need = self._need(request, headroom)
            if need is None:
                return None
            num_tokens = chunk(self._config, request, need.num_cached, budget, first, spans)
            waits = not num_tokens and self._waits_for_pictures(request, need.num_cached)
            if not (num_tokens or waits) or not self._has_room(need):
                return None
            for resource in self.resources:
                resource.reserve(need)
        except Exception as error:
            raise RequestError(request) from error
        self._started(request, need.num_cached)
        self.requests.popleft()
        if not running or running[-1].rank < request.rank:
            running.append(request)
        else:
            insort(running, request, key=rank_of)
        if num_tokens:
            spans.append(prompt_span(request, need.num_cached, num_tokens))
        return need

    def _waits_for_pictures(self, request: Request, num_cached: int) -> bool:
        """Whether a request has nothing to run until a picture is encoded, which it must hold."""
        pictures = self._config.pictures
        if pictures is None:
            return False
        count = len(request.token_ids) - num_cached
        return pictures.num_readable(request, num_cached, count) < count

    def _waits_for_leader(self, request: Request) -> bool:
        return (
            self._config.prefix_caching
            and request.shares_blocks
            and waits_for_leader(request, self._config.block_size)
        )

    def _need(self, request: Request, headroom: int | None) -> Need | None:
        """What a request needs; headroom: of those that run, None without any. None: no room."""
        # Ahead of the search for its prompt: it needs one block of its own in any case.
        if not self._blocks.manager.can_allocate(1 + (headroom or 0), ()):
            return None
        shared, num_cached = self.states.matched(request, *self._blocks.cached(request))
        num_blocks = request.max_num_blocks
        if not self._config.reserve_full:
            num_blocks = self._blocks.needed(request, len(request.token_ids))
        num_spare = 0
        if headroom is not None:
            num_spare = headroom + request.num_slots * (num_blocks < request.max_num_blocks)
        return Need(request, shared, num_cached, num_blocks, num_spare)

    def _has_room(self, need: Need) -> bool:
        return all(resource.has_room(need) for resource in self.resources)

    def _started(self, request: Request, num_cached: int) -> None:
        request.num_computed_tokens = num_cached
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = time.perf_counter()
            request.num_cached_tokens = num_cached
            self._stats.num_prompt_tokens += request.num_prompt_tokens
            self._stats.num_prefix_hit_tokens += num_cached
