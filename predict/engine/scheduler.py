"""Which tokens of which requests run in the next step, and how its result changes the requests.

A batch is a ragged list of token spans (after vLLM's v1 scheduler): each request contributes
`num_tokens + drafts - num_computed_tokens` tokens within a budget, so that chunked prefill,
prefix-cache hits, decode and draft verification differ in span length only.

Why it never runs out of blocks and never starves a request:
- `add` refuses a request that could not finish alone in the whole cache;
- a request is admitted with the blocks of all its known tokens, so prefill never waits for one;
- all requests have one order, that of their ranks, which never changes: the time of arrival plus
  `priority_aging` seconds for each number of `priority`. A number less is worth that much waiting,
  so that only finitely many requests ever go before another;
- a decoding request that needs a block preempts the last running one of that order, at worst
  itself, so that the first always proceeds;
- waiting requests are admitted in that order only, and a preempted one returns to its place in it;
- the first in the queue is tried in every step, over all resources (predict.engine.resources). It
  preempts running ones behind it where it needs their room (predict.engine.planning).

A request with a tuned prefix (predict.adapters.prefixes) has that in the cache before its own
tokens: its table begins with the prefix's whole blocks, which it shares, and a copy of the partial
one. Counts of tokens are of its own, and those of blocks of both. Beside a draft model it has a
block more where there is a partial one: then its own tokens fill whole blocks of the draft's cache.

The beams of a search (predict.engine.searches) are requests of the batch, in its place.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from predict.adapters.prefixes import ServedPrefix
from predict.engine.admission import Limits
from predict.engine.appending import append_tokens, num_rejected
from predict.engine.beams import Candidates
from predict.engine.failures import explained
from predict.engine.planning import Planner
from predict.engine.queue import Queue
from predict.engine.request_state import BeamGroup, Request, RequestStatus
from predict.engine.resources import AdapterPages, CacheBlocks, Prefixes
from predict.engine.scheduled import Outstanding, ScheduledBatch, SchedulerConfig
from predict.engine.searches import Searches
from predict.engine.stats import EngineStats
from predict.errors import UserError
from predict.request import FinishReason


class Scheduler:
    """Owns the queues and the block manager, and writes the state of every added request.

    A step is `batch = schedule()`, run it, `finished = update(batch, sampled, eos_token_ids)`.
    With `advance(batch)` once it runs, the next one may be scheduled before its result is known
    (one ahead: two batches are out at most). `abort` is allowed at any time. Not thread-safe.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = CacheBlocks(config)
        self.block_manager = self.blocks.manager
        self._prefixes = Prefixes(self.blocks)
        self._adapters = AdapterPages(config.adapters)
        self.stats = EngineStats()
        self._requests: dict[int, Request] = {}  # unfinished, by id
        self.guests: set[Request] = set()  # that others run, and that hold blocks and adapters
        self._queue = Queue(config, self.blocks, self._adapters, self.stats)
        self._waiting, self._states = self._queue.requests, self._queue.states
        self._searches = Searches(self.blocks, self._states)
        self._limits = Limits(self.blocks, self._searches)
        self._planner = Planner(config, self._queue, self.blocks, self._searches, self.stats)
        self._running = self._planner.running
        self._out = Outstanding()
        self._num_added = 0
        self._last_arrival = 0.0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences in the batch, at most max_num_seqs."""
        return sum(request.num_slots for request in self._running)

    @property
    def decoding(self) -> list[Request]:
        """Running requests whose next step is one token, in the order of rank."""
        return [request for request in self._running if request.num_left == 1]

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks that tuned prefixes fill."""
        return len(self.blocks.pinned)

    def pin_prefix(self, name: str, num_tokens: int, is_late: bool = False) -> ServedPrefix:
        """A prefix that requests may have, with its own blocks, which the caller must write.

        is_late: requests may already run. Raises UserError where no free block would be left, and
        where is_late and an unfinished request, or one of max_length, might lack blocks.
        """
        own = (r.max_num_blocks - len(r.prefix.block_ids) for r in self._requests.values())
        most = max(self.config.max_blocks_per_seq + self.config.for_drafts, *own, 0)
        return self._prefixes.pin(name, num_tokens, most if is_late else None)

    def unpin_prefix(self, prefix: ServedPrefix) -> None:
        """Gives up a prefix; its blocks are freed when its last request ends."""
        self._prefixes.unpin(prefix)

    def forget_cache(self) -> None:
        """Forgets all that is cached for requests to come. Raises RuntimeError while some run."""
        if self._requests or self.guests:
            raise RuntimeError("requests run, and hold what would be forgotten")
        self.block_manager.forget_cached()
        self._states.forget_kept()
        if self.config.adapters is not None:
            self.config.adapters.forget_idle()

    def make_room(self, wanted: bool) -> None:
        """Whether nothing joins running requests, so that their ends make room for others."""
        self._queue.yields = wanted

    def has_unfinished(self) -> bool:
        """Whether `schedule` has anything to do."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Puts `request` into the waiting queue, by its rank, and sets its limits.

        Raises UserError, with the numbers, when its id is in use, when its prompt leaves no
        room for an output token, when it has more beams than the batch sequences, or when its
        whole length does not fit in an empty cache.
        """
        if request.request_id in self._requests:
            raise UserError(f"request id {request.request_id} is in use by an unfinished request")
        if request.status is not RequestStatus.WAITING or request.arrival_index >= 0:
            raise UserError(f"{request!r} was added before; make a new Request to run it again")
        self._prefixes.check_known(request)
        self._adapters.check_fits(request)
        self._limits.set(request)
        if request.sampling_params.num_beams > 1:
            request.beam_group = BeamGroup(request)
        request.arrival_index = self._num_added
        self._num_added += 1
        self._rank(request)
        self._prefixes.reserve(request)
        self._requests[request.request_id] = request
        self._queue.put(request)
        self._queue.fetch()

    def _rank(self, request: Request) -> None:
        """Sets the place of an added request among all others, which it keeps."""
        # Never before one that came earlier, whenever the caller made it.
        self._last_arrival = max(self._last_arrival, request.arrival_time)
        priority = request.sampling_params.priority
        due = self._last_arrival + priority * self.config.priority_aging
        request.rank = due, request.arrival_index
        self._planner.has_priorities |= priority != 0

    def wait(self) -> bool:
        """Waits until the first in the queue may be tried; False where it waits for no file."""
        return self._queue.wait()

    def abort(self, request_id: int, reason: FinishReason = "abort") -> Request | None:
        """Ends a request as `reason` and frees its blocks; None if it is unknown or ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running[:] = [r for r in self._running if r.owner is not request]
        else:
            self._waiting.remove(request)
        self._finish(request, reason, time.perf_counter())
        return request

    def schedule(
        self, draft_token_ids: Mapping[int, Sequence[int]] | None = None
    ) -> ScheduledBatch | None:
        """The next step, or None when there is nothing to run (before the next update).

        Decoding requests first, one token each and as many of their drafts
        (`draft_token_ids`: request id -> proposed next tokens) as budget, length limit and free
        blocks allow; the rest of the budget goes to prompts that have begun, then to waiting
        requests in the order of rank. Prompts of smaller priority numbers go before all that is
        behind them. With separate_steps, prompts and decoding requests take turns.
        Raises RequestError where one request's part fails: abort it, and schedule again.
        """
        if not self._requests:
            return None
        self._out.check_room()
        spans, preempted = self._planner.plan(draft_token_ids)
        if not spans:
            return None  # every request waits for its last token, or for a picture
        copies, self.blocks.copies = self.blocks.copies, []
        num_tokens = sum(span.num_tokens for span in spans)
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += num_tokens
        self._out.last = ScheduledBatch(
            spans=tuple(self._states.assigned(spans)),
            num_tokens=num_tokens,
            num_samples=sum(span.samples for span in spans),
            preempted=tuple(preempted),
            # A block that went to another since an attempt that failed has the last one's content.
            block_copies=tuple((a, b) for b, a in {b: a for a, b in copies}.items()),
        )
        return self._out.last

    def undrafted(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The last scheduled batch without its drafts, in its place."""
        return self._out.undrafted(batch)

    def check(self) -> None:
        """Raises RuntimeError unless all resources are free or held by those who have them."""
        requests = [*self._requests.values(), *self.guests]
        self._prefixes.check(self._requests.values())
        for resource in self._queue.resources:
            resource.check(requests)

    def advance(self, batch: ScheduledBatch) -> None:
        """Marks `batch` as running: `schedule` may be called before its result is known.

        Each sampling span's request gets a placeholder for its new token: -1 - i for the i-th of
        the batch's sampling spans. Raises RuntimeError when `batch` is not the last scheduled one,
        ValueError when it has drafts or beams, whose result decides the next step.
        """
        self._out.advance(batch)
        placeholder = 0
        for span in batch.spans:
            request = span.request
            placeholder -= span.samples
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted since
            request.num_computed_tokens = self._states.written(span, span.start + span.num_tokens)
            if span.samples:
                request.token_ids.append(placeholder)
                request.num_placeholders += 1

    def update(
        self,
        batch: ScheduledBatch,
        sampled: Sequence[int | Sequence[int] | Candidates],
        eos_token_ids: Collection[int] = (),
    ) -> list[Request]:
        """Writes back the result of `batch`; the requests that ended with it, their blocks freed.

        `sampled` has one entry per span with `samples`, in the batch's order: the new token
        (Python int), or for a span with drafts the accepted drafts followed by one more token
        (1 to 1 + drafts of them), or of a beam its Candidates. Entries of requests that ended since
        are ignored. A request whose part fails ends as "error". Raises ValueError on a wrong count
        and for accepted tokens that are no drafts, RuntimeError when `batch` is neither the
        oldest advanced one nor, with none advanced, the last scheduled one.
        """
        advanced = self._out.take(batch, len(sampled))
        now = time.perf_counter()
        finished: list[Request] = []
        found: dict[BeamGroup, list[Candidates]] = {}  # of each beam, in order
        entries = iter(sampled)
        block_size = self.config.block_size
        for span in batch.spans:
            request, num_tokens, start, _, samples, drafts, _, _ = span
            entry = next(entries) if samples else ()
            if request.status is RequestStatus.FINISHED:
                continue  # aborted while the step ran, or ended by the step before it
            computed = start + num_tokens
            reason: FinishReason | None = None
            if isinstance(entry, Candidates):
                assert request.beam_group is not None
                found.setdefault(request.beam_group, []).append(entry)
            elif samples:
                accepted: Sequence[int] = (entry,) if isinstance(entry, int) else entry
                if drafts or len(accepted) != 1:
                    # Rejected drafts roll back: later tokens write their slots again.
                    computed -= num_rejected(accepted, drafts, request)
                try:
                    reason = append_tokens(request, accepted, now, eos_token_ids, self.stats)
                except Exception as error:  # of its text
                    finished.append(self._fail(request, error, now))
                    continue
            if request.status is RequestStatus.RUNNING:
                if not advanced:
                    request.num_computed_tokens = self._states.written(span, computed)
                self._states.told(request)
                num_full = (request.prefix.num_tokens + computed) // block_size
                if num_full > request.num_published_blocks:
                    self.blocks.publish(request, min(computed, request.num_known_tokens))
            if reason is not None:
                if request.status is RequestStatus.PREEMPTED:
                    self._waiting.remove(request)
                self._finish(request, reason, now)
                finished.append(request)
            elif drafts:
                self.blocks.trim(request)
        if found:
            self._update_searches(found, now, eos_token_ids, finished)
        if finished:
            self._running[:] = [r for r in self._running if r.status is RequestStatus.RUNNING]
        return finished

    def _update_searches(
        self,
        found: Mapping[BeamGroup, Sequence[Candidates]],
        now: float,
        eos_token_ids: Collection[int],
        finished: list[Request],
    ) -> None:
        """Forks the beams of searches by their candidates, or ends them."""
        for group, candidates in found.items():
            try:
                going_on = group.choose(candidates, eos_token_ids)
                if going_on:
                    self._searches.fork(group, going_on, self._running)
                    continue
                self._end_search(group, now)
                finished.append(group.request)
            except Exception as error:
                finished.append(self._fail(group.request, error, now))

    def _end_search(self, group: BeamGroup, now: float) -> None:
        """Ends a request with the tokens and the reason of its best hypothesis."""
        request, best = group.request, group.finished[0]
        request.token_ids += best.token_ids
        request.token_times = [now] * len(best.token_ids)
        self.stats.num_output_tokens += sum(len(each.token_ids) for each in group.returned)
        self._finish(request, best.finish_reason, now)

    def _fail(self, request: Request, error: Exception, now: float) -> Request:
        """Ends a request whose part of an update failed; returns it."""
        if request.status is RequestStatus.PREEMPTED:
            self._waiting.remove(request)
        request.error = explained(request, error)
        self._finish(request, "error", now)
        return request

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        self._queue.release(request)
        del request.token_ids[request.num_known_tokens :]
        request.num_placeholders = 0
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finish_time = now
        del self._requests[request.request_id]
        self._prefixes.release(request)
