"""Which tokens of which requests run in the next step, and how its result changes the requests.

A batch is a ragged list of token spans (after vLLM's v1 scheduler): each request contributes
`num_tokens + drafts - num_computed_tokens` tokens within a budget, so that chunked prefill,
prefix-cache hits, decode and draft verification differ in span length only.

Why it never runs out of blocks and never starves a request:
- `add` refuses a request that could not finish alone in the whole cache;
- a request is admitted with the blocks of all its known tokens, so prefill never waits for one;
- a decoding request that needs a block preempts the newest running one, at worst itself, so the
  oldest always proceeds;
- waiting requests are admitted in arrival order only, and a preempted one returns to the front:
  running, then waiting, is always the order of arrival;
- the first in the queue is tried in every step, over all resources (predict.engine.resources).

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
from predict.engine.failures import RequestError, explained
from predict.engine.queue import Queue, chunk
from predict.engine.request_state import BeamGroup, Request, RequestStatus
from predict.engine.resources import AdapterPages, CacheBlocks, Prefixes
from predict.engine.scheduled import (
    Outstanding,
    ScheduledBatch,
    ScheduledSpan,
    SchedulerConfig,
    prompt_span,
)
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
        self._running: list[Request] = []  # in arrival order
        self._out = Outstanding()
        self._num_added = 0
        self._prompts_are_next = True  # with separate_steps

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
        """Running requests whose next step is one token, in arrival order."""
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

    def make_room(self, wanted: bool) -> None:
        """Whether nothing joins running requests, so that their ends make room for others."""
        self._queue.yields = wanted

    def has_unfinished(self) -> bool:
        """Whether `schedule` has anything to do."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Puts `request` at the end of the waiting queue and sets its limits.

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
        self._prefixes.reserve(request)
        self._requests[request.request_id] = request
        self._waiting.append(request)
        self._queue.fetch()

    def wait(self) -> bool:
        """Waits until the first in the queue may be tried; False where it waits for no file."""
        return self._queue.wait()

    def abort(self, request_id: int, reason: FinishReason = "abort") -> Request | None:
        """Ends a request as `reason` and frees its blocks; None if it is unknown or ended."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        if request.status is RequestStatus.RUNNING:
            self._running = [r for r in self._running if r.owner is not request]
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
        requests in arrival order. With separate_steps, prompts and decoding requests take turns.
        Raises RequestError where one request's part fails: abort it, and schedule again.
        """
        if not self._requests:
            return None
        self._out.check_room()
        spans: list[ScheduledSpan] = []
        prefilling: list[Request] = []
        preempted: list[Request] = []
        separate = self.config.separate_steps
        if separate and self._prompts_are_next:
            begun = [request for request in self._running if request.num_left > 1]
            self._schedule_prompts(begun, spans, preempted)
        if spans:
            self._prompts_are_next = False
        else:
            self._schedule_decodes(spans, prefilling, preempted)
            if draft_token_ids:
                self._add_drafts(draft_token_ids, spans)
            self._prompts_are_next = bool(spans)
            if not (separate and spans):
                self._schedule_prompts(prefilling, spans, preempted)
        copies, self.blocks.copies = self.blocks.copies, []
        if not spans:
            return None  # every request waits for its last token
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
            self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
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

    def _schedule_decodes(
        self,
        spans: list[ScheduledSpan],
        prefilling: list[Request],
        preempted: list[Request],
    ) -> None:
        """Appends a span per decoding request; the others that keep running go to `prefilling`."""
        running = self._running
        block_size = self.config.block_size
        index = 0
        try:
            while index < len(running):  # preemption shortens it from the end
                request = running[index]
                index += 1
                start = request.num_computed_tokens
                num_tokens = len(request.token_ids)
                if request.num_left > 1:
                    prefilling.append(request)
                    continue
                if num_tokens >= request.max_num_tokens:
                    continue  # its last token is on its way
                group = request.beam_group
                if group is not None:
                    # Of all beams with the first; the others follow it.
                    if request is group.beams[0] and not self._grow_beams(group, preempted):
                        break
                elif request.prefix.num_reserved + num_tokens > len(
                    request.block_ids
                ) * block_size and not self._grow(request, preempted):
                    break
                spans.append(ScheduledSpan(request, 1, start, request.block_ids, True))
        except Exception as error:
            raise RequestError(request) from error

    def _add_drafts(
        self, draft_token_ids: Mapping[int, Sequence[int]], spans: list[ScheduledSpan]
    ) -> None:
        """Lengthens the decoding spans, in place, by the drafts that fit.

        Drafts are a bet. They come after every request has its block, so that they take free
        blocks but never preempt, and they leave one token of the budget to each other request.
        """
        num_spare = self.config.max_num_batched_tokens - len(self._running)
        for index, span in enumerate(spans):
            request = span.request
            drafts = draft_token_ids.get(request.request_id, ())
            num_tokens = len(request.token_ids)
            # The step yields one token more than there are drafts.
            limit = min(len(drafts), num_spare, request.max_num_tokens - num_tokens - 1)
            if limit <= 0:
                continue
            limit = self.blocks.lengthen(request, limit)
            num_spare -= limit
            spans[index] = span._replace(
                num_tokens=1 + limit, draft_token_ids=tuple(drafts[:limit])
            )

    def _schedule_prompts(
        self, prefilling: Sequence[Request], spans: list[ScheduledSpan], preempted: list[Request]
    ) -> None:
        """Gives the rest of the budget to the prompts that have begun, then to waiting requests."""
        num_decodes = len(spans)
        budget = self.config.max_num_batched_tokens - sum(span.num_tokens for span in spans)
        try:
            for request in prefilling:
                start, first = request.num_computed_tokens, len(spans) == num_decodes
                num_tokens = chunk(self.config, request, start, budget, first, spans)
                if num_tokens:
                    spans.append(prompt_span(request, start, num_tokens))
                    budget -= num_tokens
        except Exception as error:
            raise RequestError(request) from error
        if self._waiting and not preempted:
            self._queue.admit(self._running, budget, num_decodes, spans)

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Gives `request` one more block, preempting from the newest; False: itself preempted."""
        while self.block_manager.num_free_blocks == 0:
            if self._preempt_newest(preempted) is request:
                return False
        request.block_ids += self.block_manager.allocate(1)
        return True

    def _grow_beams(self, group: BeamGroup, preempted: list[Request]) -> bool:
        """See Searches.grow. False: all of them preempted."""
        return self._searches.grow(
            group, lambda: self._preempt_newest(preempted) is not group.request
        )

    def _end_search(self, group: BeamGroup, now: float) -> None:
        """Ends a request with the tokens and the reason of its best hypothesis."""
        request, best = group.request, group.finished[0]
        request.token_ids += best.token_ids
        request.token_times = [now] * len(best.token_ids)
        self.stats.num_output_tokens += sum(len(each.token_ids) for each in group.returned)
        self._finish(request, best.finish_reason, now)

    def _preempt_newest(self, preempted: list[Request]) -> Request:
        """Frees the blocks of the newest running request and puts it first in the queue.

        Its tokens stay, but those of a beam search. Returns it.
        """
        request = self._running.pop().owner
        while self._running and self._running[-1].owner is request:
            self._running.pop()
        self._release(request)
        if request.beam_group is not None:
            request.beam_group.restart()
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        self._waiting.appendleft(request)
        preempted.append(request)
        return request

    def _fail(self, request: Request, error: Exception, now: float) -> Request:
        """Ends a request whose part of an update failed; returns it."""
        if request.status is RequestStatus.PREEMPTED:
            self._waiting.remove(request)
        request.error = explained(request, error)
        self._finish(request, "error", now)
        return request

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        self._release(request)
        del request.token_ids[request.num_known_tokens :]
        request.num_placeholders = 0
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finish_time = now
        del self._requests[request.request_id]
        self._prefixes.release(request)

    def _release(self, request: Request) -> None:
        """Gives back what an added request holds, if it runs, and so its beams."""
        if request.status is RequestStatus.RUNNING:
            for resource in self._queue.resources:
                resource.release(request)
