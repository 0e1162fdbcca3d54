"""A scheduler's limits, and what it makes: batches of spans of tokens. Imports no Paddle."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from predict.adapters.pool import AdapterPool
from predict.engine.block_manager import num_blocks_for
from predict.engine.picture_rows import PictureRows
from predict.engine.request_state import Request
from predict.errors import UserError
from predict.nn.places import Placing

STRIDE = 64  # tokens: kept states lie at multiples of it, and of a block's


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
    priority_aging: float = 60.0  # seconds of waiting that make up for one of `priority`
    chunked_prefill: bool = True  # False: a prompt runs whole in one step
    separate_steps: bool = False  # no step has both prompts and decoding requests; they take turns
    cache_salt: bytes = b""
    for_drafts: bool = False  # a draft model's cache lies in blocks of the same numbers
    lookahead: int = 0  # see BlockManager: 1 where rows of drafts depend on the token behind theirs
    adapters: AdapterPool | None = None  # of a network whose requests may have adapters
    pictures: PictureRows | None = None  # of a network with a tower
    placing: Placing | None = None  # for a network whose positions are not 0, 1, 2, ...
    # Of a network with states (predict.engine.states): two for each sequence, and more; else 0.
    num_state_slots: int = 0
    same_bits: bool = False  # how steps are cut changes no bit: see predict.engine.queue.chunk
    # Whether answers leave states behind. Not where prompts and answers round differently, and each
    # is to have the same bits however it came about.
    answers_leave_states: bool = True

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
        least = self.max_num_seqs + STRIDE
        if self.same_bits and self.num_state_slots and self.max_num_batched_tokens < least:
            raise UserError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is too small for "
                f"batch_invariant with states: prompts go by {STRIDE} tokens beside one of each "
                f"other sequence (allowed: {least} and more)"
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
    state: tuple[int, int] = (-1, -1)  # slots of states to read and to write, -1: none

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
    """One step: decoding spans in the order of rank, then those of prompts."""

    spans: tuple[ScheduledSpan, ...]  # never empty; each request at most once
    num_tokens: int  # sum over the spans
    num_samples: int  # spans with `samples`
    preempted: tuple[Request, ...] = ()  # the last first; back in the waiting queue
    block_copies: tuple[tuple[int, int], ...] = ()  # (from, to), in order, before the step runs

    @property
    def decides(self) -> bool:
        """Whether the next step depends on more of the result than new tokens."""
        return any(
            span.draft_token_ids or (span.samples and span.request.beam_group is not None)
            for span in self.spans
        )


def prompt_span(request: Request, start: int, num_tokens: int) -> ScheduledSpan:
    """A span of a request that owns its blocks and has more than one token to compute."""
    end, num_prompt_logits = start + num_tokens, 0
    if request.wants_prompt_logits:
        num_prompt_logits = max(min(end, request.num_prompt_tokens - 1) - start, 0)
    samples = end == len(request.token_ids)
    return ScheduledSpan(
        request, num_tokens, start, request.block_ids, samples, (), num_prompt_logits
    )


class Outstanding:
    """The batches of a scheduler that have no result yet."""

    def __init__(self) -> None:
        self.last: ScheduledBatch | None = None  # until it is advanced
        self._advanced: deque[ScheduledBatch] = deque()  # oldest first

    def check_room(self) -> None:
        """Raises RuntimeError where no further batch may be made."""
        if len(self._advanced) > 1:
            raise RuntimeError("two steps are out already; update() the older one first")

    def undrafted(self, batch: ScheduledBatch) -> ScheduledBatch:
        """See Scheduler.undrafted."""
        if batch is not self.last:
            raise RuntimeError("undrafted() takes the batch of the last schedule()")
        spans = tuple(
            span._replace(num_tokens=1, draft_token_ids=()) if span.draft_token_ids else span
            for span in batch.spans
        )
        num_tokens = sum(span.num_tokens for span in spans)
        self.last = replace(batch, spans=spans, num_tokens=num_tokens)
        return self.last

    def advance(self, batch: ScheduledBatch) -> None:
        """See Scheduler.advance."""
        if batch is not self.last:
            raise RuntimeError("advance() takes the batch of the last schedule(), once")
        if batch.decides:
            raise ValueError("a batch with drafts or beams cannot be advanced; update() it first")
        self.last = None
        self._advanced.append(batch)

    def take(self, batch: ScheduledBatch, num_sampled: int) -> bool:
        """Takes out a batch that has a result; whether it was advanced. See Scheduler.update."""
        advanced = bool(self._advanced)
        if batch is not (self._advanced[0] if advanced else self.last):
            raise RuntimeError(
                "update() takes the oldest batch that has no result, or the last scheduled, once"
            )
        if num_sampled != batch.num_samples:
            raise ValueError(
                f"{num_sampled} sampled entries for {batch.num_samples} sampling spans"
            )
        if advanced:
            self._advanced.popleft()
        else:
            self.last = None
        return advanced
