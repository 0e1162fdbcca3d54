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
  running, then waiting, is always the order of arrival.

A request with a tuned prefix (predict.adapters.prefixes) has that in the cache before its own
tokens: its table begins with the prefix's whole blocks, which it shares, and a copy of the partial
one. Counts of tokens are of its own, and those of blocks of both. Beside a draft model it has a
block more where there is a partial one: then its own tokens fill whole blocks of the draft's cache.

A beam search (predict.engine.beams) is one request until its prompt is computed. Then its beams, in
its place, are requests that decode as all others do; the group decides after each step which of
them go on and fork. Forked beams share all blocks; before a beam writes into a block that others
hold it gets a copy (`block_copies` of the batch). The beams are preempted together, and the search
then starts again from its prompt, which gives the same text.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from predict.adapters.pool import AdapterPool, ServedAdapter
from predict.adapters.prefixes import ServedPrefix, prefix_in
from predict.engine.beams import Candidates
from predict.engine.block_manager import BlockManager, num_blocks_for
from predict.engine.failures import RequestError, explained
from predict.engine.request_state import BeamGroup, Request, RequestStatus
from predict.engine.stopping import finish_reason, max_total_tokens
from predict.errors import UserError
from predict.nn.places import Placing
from predict.request import FinishReason

# Rows of logits for prompts' logprobs in a step: 128 MiB with a vocabulary of 128k.
MAX_PROMPT_LOGITS = 256


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler. Raises UserError for a value or a pair that cannot work."""

    max_num_seqs: int  # requests in the batch at once
    max_num_batched_tokens: int  # tokens in a step
    max_length: int  # prompt + output tokens of one request
    block_size: int  # tokens
    num_blocks: int
    reserve_full: bool = False  # take the blocks of a request's whole length at admission
    prefix_caching: bool = True
    chunked_prefill: bool = True  # False: a prompt runs whole in one step
    separate_steps: bool = False  # no step has both prompts and decoding requests; they take turns
    cache_salt: bytes = b""
    for_drafts: bool = False  # a draft model's cache lies in blocks of the same numbers
    adapters: AdapterPool | None = None  # of a network whose requests may have adapters
    placing: Placing | None = None  # for a network whose positions are not 0, 1, 2, ...

    def __post_init__(self) -> None:
        sizes = "max_num_seqs max_num_batched_tokens max_length block_size num_blocks"
        for name in sizes.split():
            if getattr(self, name) < 1:
                raise UserError(f"{name} {getattr(self, name)} is too small (allowed: 1 or more)")
        if self.max_length < 2:
            raise UserError(
                f"max_length {self.max_length} leaves no room for a prompt and an output token "
                "(allowed: 2 or more)"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs "
                f"{self.max_num_seqs}: a step could not decode every sequence; raise "
                "max_num_batched_tokens or lower max_num_seqs"
            )

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of the longest request: the width of a block table."""
        return num_blocks_for(self.max_length, self.block_size)


class ScheduledSpan(NamedTuple):
    """Consecutive tokens of one request in one step (a tuple: 128 are made per step).

    Tokens `start`..`start + num_tokens - 1` of the request's tokens followed by
    `draft_token_ids`. `block_ids` is the request's own list, not a copy: it covers the span, must
    not be changed, and holds for this step only.
    """

    request: Request
    num_tokens: int
    start: int  # num_computed_tokens before the step
    block_ids: list[int]
    samples: bool  # reaches the end of the known tokens: its last rows yield new tokens
    draft_token_ids: Sequence[int] = ()
    num_prompt_logits: int = 0  # leading rows to project as well, for the prompt's logprobs

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of a tuned prefix in the cache before the request's own."""
        return self.request.prefix.num_tokens

    @property
    def token_ids(self) -> list[int]:
        """The span's tokens, drafts included (a new list of num_tokens)."""
        end = self.start + self.num_tokens - len(self.draft_token_ids)
        return [*self.request.token_ids[self.start : end], *self.draft_token_ids]

    @property
    def prompt_targets(self) -> list[int]:
        """The prompt's tokens behind its `num_prompt_logits` rows (a new list)."""
        first = self.start + 1
        return self.request.token_ids[first : first + self.num_prompt_logits]

    @property
    def num_logits(self) -> int:
        """Trailing rows of the span to project: 1 + drafts where it samples, else 0."""
        return 1 + len(self.draft_token_ids) if self.samples else 0


@dataclass(frozen=True)
class ScheduledBatch:
    """One step: decoding spans in arrival order, then prefill spans in arrival order."""

    spans: tuple[ScheduledSpan, ...]  # never empty; each request at most once
    num_tokens: int  # sum over the spans
    num_samples: int  # spans with `samples`
    preempted: tuple[Request, ...] = ()  # newest first; back in the waiting queue
    block_copies: tuple[tuple[int, int], ...] = ()  # (from, to), in order, before the step runs

    @property
    def decides(self) -> bool:
        """Whether the next step depends on more of the result than new tokens."""
        return any(
            span.draft_token_ids or (span.samples and span.request.beam_group is not None)
            for span in self.spans
        )


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made."""

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0  # of requests admitted for the first time
    num_prefix_hit_tokens: int = 0  # of these, taken from the prefix cache
    num_output_tokens: int = 0
    num_preemptions: int = 0


def _shares_blocks(request: Request) -> bool:
    """Whether the request may share cache blocks with others."""
    return request.places is None or not request.places.runs_whole


def _salt(request: Request) -> bytes:
    """The salt of the request's blocks: its own, and the first row of its positions."""
    places = request.places
    if places is None:
        return request.cache_salt
    return request.cache_salt + places.first_row.to_bytes(8, "little")


def _num_left(request: Request) -> int:
    """Tokens of a request that are not in the cache; 1 while it decodes."""
    return len(request.token_ids) - request.num_computed_tokens


def _num_own_blocks(request: Request) -> int:
    """The most blocks of an added request, without those shared with its prefix."""
    return request.max_num_blocks - len(request.prefix.block_ids)


def _wants_prompt_logits(request: Request) -> bool:
    """Whether logprobs of its prompt are missing: then the whole prompt must run."""
    record = request.logprobs
    return record is not None and record.wants_prompt


def _waits_for_leader(request: Request, block_size: int) -> bool:
    """Whether its leader, with the same prompt, has yet to publish blocks of that prompt."""
    leader = request.leader
    if leader is None or leader.status is not RequestStatus.RUNNING:
        return False
    num_tokens = leader.prefix.num_tokens + leader.num_prompt_tokens
    return leader.num_published_blocks < (num_tokens - 1) // block_size


def _prompt_span(request: Request, start: int, num_tokens: int) -> ScheduledSpan:
    """A span of a request that owns its blocks and has more than one token to compute."""
    end, num_prompt_logits = start + num_tokens, 0
    if _wants_prompt_logits(request):
        num_prompt_logits = max(min(end, request.num_prompt_tokens - 1) - start, 0)
    samples = end == len(request.token_ids)
    return ScheduledSpan(
        request, num_tokens, start, request.block_ids, samples, (), num_prompt_logits
    )


def _num_rejected(accepted: Sequence[int], drafts: Sequence[int], request: Request) -> int:
    """Drafts of a span that `accepted`, the leading drafts and one more token, leaves out.

    Raises ValueError for anything else: the cache would hold other tokens than the request. Drafts
    below 0 are placeholders: the caller alone knows what they stand for.
    """
    num_kept = len(accepted) - 1
    if not 0 <= num_kept <= len(drafts) or any(
        0 <= draft != token for token, draft in zip(accepted, drafts[:num_kept], strict=False)
    ):
        raise ValueError(
            f"request {request.request_id}: sampled {list(accepted)} for drafts {list(drafts)} "
            "(allowed: leading drafts followed by one more token)"
        )
    return len(drafts) - num_kept


class Scheduler:
    """Owns the queues and the block manager, and writes the state of every added request.

    A step is `batch = schedule()`, run it, `finished = update(batch, sampled, eos_token_ids)`.
    With `advance(batch)` once it runs, the next one may be scheduled before its result is known
    (one ahead: two batches are out at most). `abort` is allowed at any time. Not thread-safe.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.block_manager = BlockManager(
            config.num_blocks, config.block_size, config.prefix_caching, config.cache_salt
        )
        self.stats = SchedulerStats()
        self._requests: dict[int, Request] = {}  # unfinished, by id
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # in arrival order
        self._prefixes: dict[ServedPrefix, int] = {}  # pinned: unfinished requests with each
        self._leaving: set[ServedPrefix] = set()  # of these: that no more requests may have
        self.num_pinned_blocks = 0  # that prefixes fill
        self._scheduled: ScheduledBatch | None = None  # the last one, until it is advanced
        self._advanced: deque[ScheduledBatch] = deque()  # oldest first, their results still unknown
        # Planned and not in a batch yet: their blocks are in the beams' tables already.
        self._copies: list[tuple[int, int]] = []
        self._num_added = 0
        self._num_beams = 0  # made since: beams have ids below 0
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
        return [request for request in self._running if _num_left(request) == 1]

    @property
    def _num_unpinned(self) -> int:
        return self.config.num_blocks - self.num_pinned_blocks

    @property
    def _adapters(self) -> AdapterPool:
        assert self.config.adapters is not None  # see add()
        return self.config.adapters

    def pin_prefix(self, name: str, num_tokens: int, is_late: bool = False) -> ServedPrefix:
        """A prefix that requests may have, with its own blocks, which the caller must write.

        is_late: requests may already run. Raises UserError where no free block would be left, and
        where is_late and an unfinished request, or one of max_length, might lack blocks.
        """
        block_size, free = self.config.block_size, self.block_manager.num_free_blocks
        num_blocks = num_blocks_for(num_tokens, block_size)
        if num_blocks >= free:
            raise UserError(
                f"prefix {name or 'of prefix_path'} has {num_tokens} tokens, which take "
                f"{num_blocks} blocks of {block_size} tokens, and the cache has {free} free ones "
                f"(allowed: up to {free - 1}); raise num_cache_blocks"
            )
        left = self._num_unpinned - num_blocks
        longest = self.config.max_blocks_per_seq + self.config.for_drafts
        most = max([longest, *map(_num_own_blocks, self._requests.values())])
        if is_late and most > left:
            raise UserError(
                f"prefix {name} has {num_tokens} tokens, which take {num_blocks} blocks of "
                f"{block_size} tokens and leave {left}, and a request may need {most}; unload "
                "another prefix, or raise num_cache_blocks"
            )
        block_ids = self.block_manager.allocate(num_blocks)
        prefix = prefix_in(name, num_tokens, block_ids, block_size, self.config.for_drafts)
        self._prefixes[prefix] = 0
        self.num_pinned_blocks += num_blocks
        return prefix

    def unpin_prefix(self, prefix: ServedPrefix) -> None:
        """Gives up a prefix; its blocks are freed when its last request ends."""
        self._leaving.add(prefix)
        self._free_unused(prefix)

    def _free_unused(self, prefix: ServedPrefix) -> None:
        if prefix in self._leaving and not self._prefixes[prefix]:
            self._leaving.remove(prefix)
            del self._prefixes[prefix]
            self.block_manager.free(prefix.all_block_ids)
            self.num_pinned_blocks -= len(prefix.all_block_ids)

    def _num_blocks(self, request: Request, num_tokens: int) -> int:
        """Blocks of a request with `num_tokens` tokens, its prefix's blocks included."""
        return num_blocks_for(request.prefix.num_reserved + num_tokens, self.config.block_size)

    def has_unfinished(self) -> bool:
        """Whether `schedule` has anything to do."""
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Puts `request` at the end of the waiting queue and sets its limits.

        Raises UserError, with the numbers, when its id is in use, when its prompt leaves no
        room for an output token, when it has more beams than the batch sequences, or when its
        whole length does not fit in an empty cache.
        """
        config = self.config
        if request.request_id in self._requests:
            raise UserError(f"request id {request.request_id} is in use by an unfinished request")
        if request.status is not RequestStatus.WAITING or request.arrival_index >= 0:
            raise UserError(f"{request!r} was added before; make a new Request to run it again")
        prefix = request.prefix
        if prefix.num_tokens and (prefix not in self._prefixes or prefix in self._leaving):
            raise UserError(
                f"request {request.request_id}: its prefix {prefix.name} was unloaded before the "
                "request was queued; name another one"
            )
        try:
            max_num_tokens = max_total_tokens(
                request.num_prompt_tokens,
                request.sampling_params,
                config.max_length - prefix.num_tokens,
            )
        except UserError as error:
            less = f" ({config.max_length} less {prefix.num_tokens} of its prefix)"
            why = f"{error}{less if prefix.num_tokens else ''}"
            raise UserError(f"request {request.request_id}: {why}") from None
        num_beams = request.sampling_params.num_beams
        if num_beams > config.max_num_seqs:
            raise UserError(
                f"request {request.request_id}: num_beams {num_beams} is more than the batch holds "
                f"(allowed: 1 to {config.max_num_seqs}); lower num_beams or raise batch_size"
            )
        max_num_blocks = self._num_blocks(request, max_num_tokens)
        if num_beams > 1:
            # The blocks that the prompt fills are shared to the end, all others may part.
            num_shared = (prefix.num_tokens + request.num_prompt_tokens) // config.block_size
            max_num_blocks += (num_beams - 1) * (max_num_blocks - num_shared)
        num_own, num_free = max_num_blocks - len(prefix.block_ids), self._num_unpinned
        if num_own > num_free:
            of_beams = f" of {num_beams} beams" if num_beams > 1 else ""
            raise UserError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens and up "
                f"to {max_num_tokens - request.num_prompt_tokens} output tokens{of_beams} need "
                f"{num_own} cache blocks of {config.block_size} tokens, the cache has "
                f"{num_free} (allowed: {num_free * config.block_size} tokens in "
                "all); lower max_length or max_new_tokens, or give the cache more blocks"
            )
        if request.adapter is not None:
            self._check_adapter(request, request.adapter)
        if config.placing is not None:
            request.places = config.placing.of(request.prompt_token_ids, prefix.num_tokens)
            if request.places.runs_whole:
                self._check_whole(request)
        request.max_num_tokens = max_num_tokens
        request.max_num_blocks = max_num_blocks
        if num_beams > 1:
            request.beam_group = BeamGroup(request)
        request.arrival_index = self._num_added
        self._num_added += 1
        if prefix.num_tokens:
            self._prefixes[prefix] += 1
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def _check_adapter(self, request: Request, adapter: ServedAdapter) -> None:
        """Raises UserError for an adapter that can never be loaded."""
        pool = self.config.adapters
        most = 0 if pool is None else min(pool.num_pages, pool.max_pages)
        if adapter.num_pages > most:
            raise UserError(
                f"request {request.request_id}: its adapter {adapter.name} has "
                f"{adapter.num_pages} pages (allowed: up to {most}); raise --max_lora_rank"
            )

    def _check_whole(self, request: Request) -> None:
        """Raises UserError where a bidirectional prompt cannot run in one span."""
        budget = self.config.max_num_batched_tokens
        if self.config.chunked_prefill and request.num_prompt_tokens > budget:
            raise UserError(
                f"request {request.request_id}: {request.num_prompt_tokens} prompt tokens are more "
                f"than a step takes (allowed: 1 to {budget}), and this model's prompts see "
                "themselves both ways: they run in one step; shorten the prompt, or raise "
                "max_num_batched_tokens"
            )
        if _wants_prompt_logits(request):
            raise UserError(
                f"request {request.request_id}: this model's prompts see themselves both ways, so "
                "that their tokens have no logprobs; leave prompt_logprobs out"
            )

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
        if len(self._advanced) > 1:
            raise RuntimeError("two steps are out already; update() the older one first")
        spans: list[ScheduledSpan] = []
        prefilling: list[Request] = []
        preempted: list[Request] = []
        copies = self._copies
        separate = self.config.separate_steps
        if separate and self._prompts_are_next:
            begun = [request for request in self._running if _num_left(request) > 1]
            self._schedule_prompts(begun, spans, preempted)
        if spans:
            self._prompts_are_next = False
        else:
            self._schedule_decodes(spans, prefilling, preempted, copies)
            if draft_token_ids:
                self._add_drafts(draft_token_ids, spans)
            self._prompts_are_next = bool(spans)
            if not (separate and spans):
                self._schedule_prompts(prefilling, spans, preempted)
        self._copies = []
        if not spans:
            return None  # every request waits for its last token
        num_tokens = sum(span.num_tokens for span in spans)
        self.stats.num_steps += 1
        self.stats.num_scheduled_tokens += num_tokens
        self._scheduled = ScheduledBatch(
            spans=tuple(spans),
            num_tokens=num_tokens,
            num_samples=sum(span.samples for span in spans),
            preempted=tuple(preempted),
            # A block that went to another since an attempt that failed has the last one's content.
            block_copies=tuple((a, b) for b, a in {b: a for a, b in copies}.items()),
        )
        return self._scheduled

    def undrafted(self, batch: ScheduledBatch) -> ScheduledBatch:
        """The last scheduled batch without its drafts, in its place."""
        if batch is not self._scheduled:
            raise RuntimeError("undrafted() takes the batch of the last schedule()")
        spans = tuple(
            span._replace(num_tokens=1, draft_token_ids=()) if span.draft_token_ids else span
            for span in batch.spans
        )
        num_tokens = sum(span.num_tokens for span in spans)
        self._scheduled = replace(batch, spans=spans, num_tokens=num_tokens)
        return self._scheduled

    def check(self) -> None:
        """Raises RuntimeError unless every block is free or in its holders' tables."""
        held = Counter(block for prefix in self._prefixes for block in prefix.all_block_ids)
        having = Counter(request.prefix for request in self._requests.values())
        if any(having[prefix] != count for prefix, count in self._prefixes.items()):
            raise RuntimeError("prefixes are not held by those who have them")
        if self.num_pinned_blocks != len(held):
            raise RuntimeError(f"prefixes fill {len(held)} blocks, not {self.num_pinned_blocks}")
        for request in self._running:
            held.update(request.block_ids)
        for request in self._requests.values():
            if request.beam_group is not None:
                held.update(request.beam_group.spare_block_ids)
        for request in self._waiting:
            if request.block_ids:
                raise RuntimeError(f"{request!r} waits and has blocks")
        if self.config.adapters is not None:
            owners = {request.owner for request in self._running}
            self.config.adapters.check(Counter(each.adapter for each in owners if each.adapter))
        self.block_manager.check(held)

    def advance(self, batch: ScheduledBatch) -> None:
        """Marks `batch` as running: `schedule` may be called before its result is known.

        Each sampling span's request gets a placeholder for its new token: -1 - i for the i-th of
        the batch's sampling spans. Raises RuntimeError when `batch` is not the last scheduled one,
        ValueError when it has drafts or beams, whose result decides the next step.
        """
        if batch is not self._scheduled:
            raise RuntimeError("advance() takes the batch of the last schedule(), once")
        if batch.decides:
            raise ValueError("a batch with drafts or beams cannot be advanced; update() it first")
        self._scheduled = None
        self._advanced.append(batch)
        placeholder = 0
        for span in batch.spans:
            request = span.request
            placeholder -= span.samples
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted since
            request.num_computed_tokens = span.start + span.num_tokens
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
        advanced = bool(self._advanced)
        if batch is not (self._advanced[0] if advanced else self._scheduled):
            raise RuntimeError(
                "update() takes the oldest batch that has no result, or the last scheduled, once"
            )
        if len(sampled) != batch.num_samples:
            raise ValueError(
                f"{len(sampled)} sampled entries for {batch.num_samples} sampling spans"
            )
        if advanced:
            self._advanced.popleft()
        else:
            self._scheduled = None
        now = time.perf_counter()
        finished: list[Request] = []
        found: dict[BeamGroup, list[Candidates]] = {}  # of each beam, in order
        entries = iter(sampled)
        block_size = self.config.block_size
        for span in batch.spans:
            request, num_tokens, start, _, samples, drafts, _ = span
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
                    computed -= _num_rejected(accepted, drafts, request)
                try:
                    reason = self._append(request, accepted, now, eos_token_ids)
                except Exception as error:  # of its text
                    finished.append(self._fail(request, error, now))
                    continue
            if request.status is RequestStatus.RUNNING:
                if not advanced:
                    # Accepted drafts behind the last token are no part of the request.
                    request.num_computed_tokens = min(computed, len(request.token_ids))
                num_full = (request.prefix.num_tokens + computed) // block_size
                if num_full > request.num_published_blocks:
                    self._publish(request, min(computed, request.num_known_tokens))
            if reason is not None:
                if request.status is RequestStatus.PREEMPTED:
                    self._waiting.remove(request)
                self._finish(request, reason, now)
                finished.append(request)
            elif drafts:
                self._trim(request)
        for group, candidates in found.items():
            try:
                going_on = group.choose(candidates, eos_token_ids)
                if going_on:
                    self._fork(group, going_on)
                    continue
                self._end_search(group, now)
                finished.append(group.request)
            except Exception as error:
                finished.append(self._fail(group.request, error, now))
        if finished:
            self._running = [r for r in self._running if r.status is RequestStatus.RUNNING]
        return finished

    def _append(
        self,
        request: Request,
        token_ids: Sequence[int],
        now: float,
        eos_token_ids: Collection[int],
    ) -> FinishReason | None:
        """Adds tokens, in the place of placeholders where there are some, up to one that ends it.

        Returns why the request ends.
        """
        for token_id in token_ids:
            if request.num_placeholders:
                request.token_ids[-request.num_placeholders] = token_id
                request.num_placeholders -= 1
            else:
                request.token_ids.append(token_id)
            request.token_times.append(now)
            self.stats.num_output_tokens += 1
            num_tokens = request.num_known_tokens
            num_output_tokens = num_tokens - len(request.prompt_token_ids)
            reason = finish_reason(
                token_id,
                num_output_tokens,
                num_tokens,
                request.max_num_tokens,
                request.sampling_params,
                eos_token_ids,
            )
            params = request.sampling_params
            if request.guide is not None and params.guide is not None and params.bans:
                request.guide.check(token_id, params.guide.kind, params.bans)
            if request.guide is not None and reason != "stop" and request.guide.accept(token_id):
                reason = "stop"  # nothing but an end may follow
            if request.answer is not None:
                may_stop = num_output_tokens > request.sampling_params.min_length
                if request.answer.append(token_id, may_stop, reason is not None):
                    reason = "stop"
            if reason is not None:
                return reason
        return None

    def _schedule_decodes(
        self,
        spans: list[ScheduledSpan],
        prefilling: list[Request],
        preempted: list[Request],
        copies: list[tuple[int, int]],
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
                if _num_left(request) > 1:
                    prefilling.append(request)
                    continue
                if num_tokens >= request.max_num_tokens:
                    continue  # its last token is on its way
                group = request.beam_group
                if group is not None:
                    # Of all beams with the first; the others follow it.
                    if request is group.beams[0] and not self._grow_beams(group, preempted, copies):
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
        block_size = self.config.block_size
        num_spare = self.config.max_num_batched_tokens - len(self._running)
        for index, span in enumerate(spans):
            request = span.request
            drafts = draft_token_ids.get(request.request_id, ())
            num_tokens = len(request.token_ids)
            # The step yields one token more than there are drafts.
            limit = min(len(drafts), num_spare, request.max_num_tokens - num_tokens - 1)
            if limit <= 0:
                continue
            missing = self._num_blocks(request, num_tokens + limit) - len(request.block_ids)
            if missing > 0:
                num_new = min(missing, self.block_manager.num_free_blocks)
                request.block_ids += self.block_manager.allocate(num_new)
                room = len(request.block_ids) * block_size - request.prefix.num_reserved
                limit = min(limit, room - num_tokens)
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
                num_tokens = self._chunk(request, start, budget, first, spans)
                if num_tokens:
                    spans.append(_prompt_span(request, start, num_tokens))
                    budget -= num_tokens
        except Exception as error:
            raise RequestError(request) from error
        if self._waiting and not preempted:
            try:
                self._admit(budget, num_decodes, spans)
            except Exception as error:
                # `_admit` removes a request from the queue in its last, infallible lines.
                raise RequestError(self._waiting[0]) from error

    def _chunk(
        self,
        request: Request,
        start: int,
        budget: int,
        first: bool,
        spans: Sequence[ScheduledSpan],
    ) -> int:
        """Tokens of a prompt to run now; only the `first` whole prompt may exceed the budget.

        A prompt with logprobs always runs in chunks, since its logits take memory. A bidirectional
        prompt is never cut; the tokens generated behind it before a preemption may be.
        """
        num_left = len(request.token_ids) - start
        over_budget = first and not self.config.chunked_prefill
        is_whole = start < request.num_prompt_tokens and not _shares_blocks(request)
        if is_whole and budget < request.num_prompt_tokens and not over_budget:
            return 0
        if _wants_prompt_logits(request):
            num_left = min(num_left, budget)
            budget = MAX_PROMPT_LOGITS - sum(span.num_prompt_logits for span in spans)
        elif not self.config.chunked_prefill:
            return num_left if num_left <= budget or first else 0
        return min(num_left, budget)

    def _admit(self, budget: int, num_decodes: int, spans: list[ScheduledSpan]) -> None:
        """Moves waiting requests, in order, into the batch while slots, budget and blocks last.

        The head is tried in every step: much may make room for it, and nothing remembers that it
        had none.
        """
        config, blocks = self.config, self.block_manager
        # One free block stays for each running request that may still grow: otherwise the
        # newcomer would be preempted, and its prefill lost, within a few steps. A request that
        # is alone has the whole cache and needs none, so this delays but never starves.
        headroom = 0
        if not config.reserve_full:
            headroom = sum(
                r.num_slots * (len(r.block_ids) < r.max_num_blocks) for r in self._running
            )
        num_slots = config.max_num_seqs - self.num_running
        while self._waiting and budget > 0:
            request = self._waiting[0]
            num_slots -= request.num_slots
            if num_slots < 0:
                return
            shares = _shares_blocks(request)
            if config.prefix_caching and shares and _waits_for_leader(request, config.block_size):
                return
            # Ahead of the search for its prompt: it needs one block of its own in any case.
            if not blocks.can_allocate(1 + (headroom if self._running else 0), ()):
                return
            prefix = request.prefix
            shared = list(prefix.block_ids)
            num_cached = 0
            if shares and not _wants_prompt_logits(request):
                cached, num_cached = blocks.match_prefix(
                    request.token_ids, request.block_digests, _salt(request), prefix.num_partial
                )
                shared += cached
            num_tokens = self._chunk(request, num_cached, budget, len(spans) == num_decodes, spans)
            if num_tokens == 0:
                return
            num_blocks = (
                request.max_num_blocks
                if config.reserve_full
                else self._num_blocks(request, len(request.token_ids))
            )
            grows = request.num_slots * (num_blocks < request.max_num_blocks)
            wanted = headroom + grows if self._running else 0
            if not blocks.can_allocate(num_blocks - len(shared) + wanted, shared) or (
                request.adapter is not None and not self._adapters.hold(request.adapter)
            ):
                return
            blocks.acquire(shared)
            request.block_ids = shared + blocks.allocate(num_blocks - len(shared))
            if prefix.partial is not None and len(shared) == len(prefix.block_ids):
                self._copies.append((prefix.partial, request.block_ids[len(shared)]))
            if request.beam_group is not None:
                num_own = self._num_blocks(request, len(request.token_ids))
                request.beam_group.spare_block_ids = request.block_ids[num_own:]
                del request.block_ids[num_own:]
            request.num_computed_tokens = num_cached
            request.num_published_blocks = len(shared)
            if request.first_scheduled_time is None:
                request.first_scheduled_time = time.perf_counter()
                request.num_cached_tokens = num_cached
                self.stats.num_prompt_tokens += request.num_prompt_tokens
                self.stats.num_prefix_hit_tokens += num_cached
            request.status = RequestStatus.RUNNING
            self._waiting.popleft()
            self._running.append(request)
            headroom += grows
            budget -= num_tokens
            spans.append(_prompt_span(request, num_cached, num_tokens))

    def _grow(self, request: Request, preempted: list[Request]) -> bool:
        """Gives `request` one more block, preempting from the newest; False: itself preempted."""
        while self.block_manager.num_free_blocks == 0:
            if self._preempt_newest(preempted) is request:
                return False
        request.block_ids += self.block_manager.allocate(1)
        return True

    def _grow_beams(
        self, group: BeamGroup, preempted: list[Request], copies: list[tuple[int, int]]
    ) -> bool:
        """Gives each beam its own last block; full blocks stay shared. False: all preempted.

        A beam at the end of its blocks gets a new one. Of beams that share a partly filled block,
        all but the last get a copy of it.
        """
        blocks, block_size = self.block_manager, self.config.block_size
        num_before = group.request.prefix.num_tokens
        last = [(num_before + beam.num_computed_tokens) // block_size for beam in group.beams]
        held = [
            b.block_ids[i] for b, i in zip(group.beams, last, strict=True) if i < len(b.block_ids)
        ]
        num_new = len(group.beams) - len(set(held))
        spare = group.spare_block_ids
        while len(spare) + blocks.num_free_blocks < num_new:
            if self._preempt_newest(preempted) is group.request:
                return False
        fresh = [spare.pop() for _ in range(min(num_new, len(spare)))]
        fresh += blocks.allocate(num_new - len(fresh))
        for beam, index in zip(group.beams, last, strict=True):
            if index == len(beam.block_ids):
                beam.block_ids.append(fresh.pop())
            elif blocks.ref_count(beam.block_ids[index]) > 1:
                copies.append((beam.block_ids[index], fresh[-1]))
                blocks.free([beam.block_ids[index]])
                beam.block_ids[index] = fresh.pop()
        return True

    def _fork(self, group: BeamGroup, going_on: Sequence[tuple[int, int]]) -> None:
        """Replaces a group's beams by their continuations: (index of beam, its new token)."""
        before, beams = group.beams, list[Request]()
        for index, _ in going_on:
            beam = before[index]
            if beam is group.request or beam in beams:
                self._num_beams += 1
                beam = beam.fork(-self._num_beams)
                beam.max_num_blocks = self._num_blocks(beam, beam.max_num_tokens)
                self.block_manager.acquire(beam.block_ids)
            beams.append(beam)
        for beam, (_, token_id) in zip(beams, going_on, strict=True):
            beam.token_ids.append(token_id)
        first = self._running.index(before[0])
        self._running[first : first + len(before)] = beams
        group.beams = beams
        for beam in before:
            if beam not in beams:
                self._drop_beam(beam, group)
        if self.config.reserve_full:
            # The group keeps as many blocks as the dropped beams alone had.
            spare, own = group.spare_block_ids, {b for beam in beams for b in beam.block_ids}
            missing = group.request.max_num_blocks - len(own) - len(spare)
            spare += self.block_manager.allocate(missing)

    def _drop_beam(self, beam: Request, group: BeamGroup) -> None:
        self._release(beam)
        if beam is not group.request:
            beam.status = RequestStatus.FINISHED

    def _end_search(self, group: BeamGroup, now: float) -> None:
        """Ends a request with the tokens and the reason of its best hypothesis."""
        request, best = group.request, group.finished[0]
        request.token_ids += best.token_ids
        request.token_times = [now] * len(best.token_ids)
        self.stats.num_output_tokens += sum(len(each.token_ids) for each in group.returned)
        self._finish(request, best.finish_reason, now)

    def _publish(self, request: Request, num_computed: int) -> None:
        """Publishes the blocks that `num_computed` tokens, all known, fill."""
        block_size, prefix = self.config.block_size, request.prefix
        num_full = (prefix.num_tokens + num_computed) // block_size
        if not _shares_blocks(request):
            request.num_published_blocks = num_full
            return
        first_own = len(prefix.block_ids)
        self.block_manager.publish(
            request.block_ids[first_own:] if first_own else request.block_ids,
            request.token_ids,
            request.block_digests,
            request.num_published_blocks - first_own,
            num_full - first_own,
            _salt(request),
            prefix.num_partial,
        )
        request.num_published_blocks = num_full

    def _trim(self, request: Request) -> None:
        """Frees the blocks that only rejected drafts needed."""
        if not self.config.reserve_full:
            num_blocks = self._num_blocks(request, len(request.token_ids))
            self.block_manager.free(request.block_ids[num_blocks:])
            del request.block_ids[num_blocks:]

    def _preempt_newest(self, preempted: list[Request]) -> Request:
        """Frees the blocks of the newest running request and puts it first in the queue.

        Its tokens stay, but those of a beam search. Returns it.
        """
        request = self._running.pop().owner
        while self._running and self._running[-1].owner is request:
            self._running.pop()
        self._release_all(request)
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
        self._release_all(request)
        del request.token_ids[request.num_known_tokens :]
        request.num_placeholders = 0
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.finish_time = now
        del self._requests[request.request_id]
        if request.prefix.num_tokens:
            self._prefixes[request.prefix] -= 1
            self._free_unused(request.prefix)

    def _release_all(self, request: Request) -> None:
        """Releases an added request, its beams included."""
        if request.adapter is not None and request.status is RequestStatus.RUNNING:
            self._adapters.release(request.adapter)
        group = request.beam_group
        if group is None:
            self._release(request)
            return
        for beam in group.beams:
            self._drop_beam(beam, group)
        self.block_manager.free(group.spare_block_ids)
        group.spare_block_ids = []

    def _release(self, request: Request) -> None:
        self.block_manager.free(request.block_ids)
        # A new list: spans of the step in flight still refer to the old one.
        request.block_ids = []
        request.num_computed_tokens = 0
        request.num_published_blocks = 0
