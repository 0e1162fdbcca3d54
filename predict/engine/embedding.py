"""Vectors and scores of texts: in the steps of answers, and in rounds of steps without a choice.

Texts ride in the room that a step of answers leaves, in order; a long one in parts, which holds its
blocks between steps. What cannot ride runs in rounds, between two steps, from the first token to
the last: where no answer runs, no room was left, the last token's logits are wanted, or a step
with the text in it failed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from predict.adapters.pool import ServedAdapter
from predict.engine.block_manager import num_blocks_for
from predict.engine.engine import Engine, StepPart
from predict.engine.hidden_rows import HostRows, Take
from predict.engine.request_state import Request, RequestStatus
from predict.engine.resources import AdapterPages, Need
from predict.engine.runner.gpu import GpuRunner
from predict.engine.runner.networks import HostRunner
from predict.engine.scheduled import ScheduledBatch, ScheduledSpan
from predict.errors import EngineError, UserError
from predict.nn.decoder import FINAL
from predict.nn.pooling import Pooled, Pooler, Vectors
from predict.request import SamplingParams

if TYPE_CHECKING:
    from paddle import Tensor

SHARING = (HostRunner, GpuRunner)  # runners whose `launch` gives hidden states
_SPARE = 2  # blocks that a text leaves to each answer that runs


class Text(NamedTuple):
    """A text's tokens.

    second: the place of the first token of a pair's second text. num_skipped: leading tokens that
    count for no mean and no maximum.
    """

    token_ids: Sequence[int]
    second: int | None = None
    num_skipped: int = 0


@dataclass(eq=False)
class VectorJob:
    """Texts that end together: `vectors` has a row for each then, unless `error` says why not."""

    pooler: Pooler
    num_tokens: int
    vectors: Vectors | None = None
    error: Exception | None = None
    found: dict[int, Vectors] = field(default_factory=dict)  # so far, by text
    num_texts: int = 0

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing more to come."""
        return self.vectors is not None or self.error is not None


class _Waiting(NamedTuple):
    """A text of a job, in the queue."""

    job: VectorJob
    number: int
    request: Request
    pooled: Pooled
    rides: bool  # in steps of answers


class Embedder:
    """A queue of texts in front of an engine. Not thread-safe. See predict.engine.engine.Riders."""

    def __init__(self, engine: Engine, take: Take):
        """engine: as a weak reference, which has this one as its riders. take: of its device."""
        self._engine: Engine = weakref.proxy(engine)
        self._host_rows = HostRows(take)
        self._queue: deque[_Waiting] = deque()
        self._begun: _Waiting | None = None  # holds its blocks between steps of answers
        self._riding: dict[Request, _Waiting] = {}  # in a step of answers that runs
        self._rode = False  # whether texts were in the last step of answers
        self._ended_riding: list[VectorJob] = []
        self._params = SamplingParams()  # texts sample nothing
        self._pages = AdapterPages(engine.scheduler.config.adapters)
        if isinstance(engine.runner, SHARING):
            engine.riders = self

    @property
    def is_busy(self) -> bool:
        """Whether texts wait, or jobs are to be handed on."""
        return bool(self._queue or self._begun or self._riding or self._ended_riding)

    def add(
        self, texts: Sequence[Text], pooler: Pooler, adapter: ServedAdapter | None = None
    ) -> VectorJob:
        """Queues texts. Raises UserError, with none queued, where one can never run."""
        if self._engine.scheduler.config.num_state_slots:
            raise UserError(
                "this model's layers keep a state of each request, and vectors and scores are not "
                "made of such models yet; use a model without, or generate"
            )
        if not texts:
            raise UserError("prompts is empty (allowed: one prompt and more)")
        job = VectorJob(pooler, sum(len(text.token_ids) for text in texts), num_texts=len(texts))
        waiting = [self._waiting(job, index, text, adapter) for index, text in enumerate(texts)]
        self._queue += waiting
        return job

    def _waiting(
        self, job: VectorJob, index: int, text: Text, adapter: ServedAdapter | None
    ) -> _Waiting:
        request, pooler = self._request(index, text, adapter), job.pooler
        pooled = Pooled(pooler, request.num_tokens, text.num_skipped)
        return _Waiting(job, index, request, pooled, pooler.answers is None)

    def abort(self, job: VectorJob) -> None:
        """Takes a job's texts out of the queue, and out of steps that run."""
        self._queue = deque(each for each in self._queue if each.job is not job)
        begun = [] if self._begun is None else [self._begun]
        self._give_back(each for each in [*begun, *self._riding.values()] if each.job is job)
        if begun and begun[0].job is job:
            self._begun = None
        self._engine.scheduler.make_room(False)

    def step(self, waits: bool = True) -> list[VectorJob]:
        """The jobs that have ended; failures are errors of jobs. To be called behind each step.

        Runs a round first, unless texts were in that step. Raises EngineError where nothing can run
        any more.

        waits: a text waits for the blocks that running answers hold, and no answer joins them; and
        for its adapter's file, while they go on. Without answers the file is waited for here.
        """
        if self._riding and not self._engine.scheduler.has_unfinished():
            self._engine.step()  # whose answers were aborted while it ran
        ended, self._ended_riding = self._ended_riding, []
        rode, self._rode = self._rode, False
        if (waits and rode) or not (self._queue or self._begun):
            return ended
        return ended + self._round(waits and self._engine.scheduler.num_running > 0)

    def _round(self, waits: bool) -> list[VectorJob]:
        if self._begun is not None:
            self._queue.appendleft(self._begun)  # with its blocks
            self._begun = None
        texts: list[_Waiting] = []
        try:
            awaited = self._pages.fetch(self._queue[0].request)
            if awaited is not None:
                if not waits:
                    wait([awaited])
                return []
            texts = self._take()
            self._engine.scheduler.make_room(not texts)
            if not texts and not waits:
                return self._fail(self._queue[0], self._no_room(self._queue[0].request))
            self._run(texts)
        except Exception as error:
            if len(texts) > 1:  # which of them failed shows when each runs alone
                return [job for text in texts for job in self._alone(text)]
            return self._fail((texts or self._queue)[0], error)
        finally:
            self._give_back(texts)
        return self._ended(texts)

    def make_way(self) -> None:
        """See Riders. The text that has begun runs in a round then, from its first token."""
        scheduler, begun = self._engine.scheduler, self._begun
        if begun is None:
            return
        num_running, manager = scheduler.num_running, scheduler.block_manager
        if num_running and manager.num_free_blocks >= _SPARE * num_running:
            return
        self._begun = None
        self._give_back([begun])
        self._queue.appendleft(begun._replace(rides=False))

    def board(self, batch: ScheduledBatch) -> list[ScheduledSpan]:
        """See Riders: of the text that has begun, and of the next ones."""
        config, spans = self._engine.scheduler.config, list[ScheduledSpan]()
        left = config.max_num_batched_tokens - batch.num_tokens
        while left > 0 and len(spans) < config.max_num_seqs and not config.separate_steps:
            text = self._begun or self._next(left)
            if text is None:
                break
            self._begun, request = None, text.request
            self._riding[request] = text
            length = min(left, request.num_left)
            start = request.num_computed_tokens
            spans.append(ScheduledSpan(request, length, start, request.block_ids, False))
            left -= length
        self._rode = bool(spans)
        if spans:
            self._engine.scheduler.make_room(False)
        return spans

    def _next(self, left: int) -> _Waiting | None:
        """The first in the queue, with its blocks, where it may begin within `left` tokens."""
        scheduler = self._engine.scheduler
        if not (self._queue and self._queue[0].rides):
            return None
        request = self._queue[0].request
        is_whole = not (request.shares_blocks and scheduler.config.chunked_prefill)
        if is_whole and request.num_tokens > left:
            return None
        try:
            if self._pages.fetch(request) is not None:
                return None
            if not self._reserve(self._queue[0], _SPARE * scheduler.num_running):
                return None
        except Exception:  # it fails in a round, alone
            return None
        return self._queue.popleft()

    def stay(self, spans: Sequence[ScheduledSpan]) -> None:
        """See Riders. In rounds it shows which text failed, if one did."""
        self._to_rounds([self._riding.pop(span.request) for span in spans])
        self._rode = False

    def _to_rounds(self, texts: Sequence[_Waiting]) -> None:
        self._give_back(texts)
        self._queue.extendleft(text._replace(rides=False) for text in reversed(texts))

    def arrive(self, part: StepPart) -> None:
        """See Riders."""
        texts = [self._riding.pop(span.request) for span in part.riding]
        first = sum(span.num_tokens for span in part.spans)
        try:
            self._pool(texts, part.riding, part.tokens.hidden.get(FINAL), None, first)
        except Exception:  # of which of them, rounds show
            left = (text for text in texts if text.number not in text.job.found)
            self._to_rounds([text for text in left if text.request.block_ids])
        self._ended_riding += self._ended(texts)
        self._give_back(text for text in texts if text.number in text.job.found)
        for text in texts:
            if text.request.block_ids:  # not aborted
                self._begun = text
        stats = self._engine.stats
        stats.num_scheduled_tokens += sum(span.num_tokens for span in part.riding)

    def _alone(self, text: _Waiting) -> list[VectorJob]:
        self._give_back([text])
        try:
            if text.job.is_finished:
                return []
            if not self._reserve(text):
                return self._fail(text, self._no_room(text.request))
            self._run([text])
        except Exception as error:
            return self._fail(text, error)
        finally:
            self._give_back([text])
        return self._ended([text])

    def _fail(self, text: _Waiting, error: Exception) -> list[VectorJob]:
        job = text.job
        self.abort(job)
        if job.is_finished:
            return []
        is_ours = isinstance(error, (UserError, EngineError))
        if not is_ours and not self._engine.scheduler.num_running:  # else answers would tell
            self._engine.blame.probe(text.request, error)
        job.error = error if is_ours else EngineError(f"{type(error).__name__}: {error}")
        return [job]

    def _ended(self, texts: Sequence[_Waiting]) -> list[VectorJob]:
        ended = []
        for job in dict.fromkeys(text.job for text in texts):
            if len(job.found) < job.num_texts or job.is_finished:
                continue
            found = np.stack([job.found[index] for index in range(job.num_texts)])
            wrong = np.flatnonzero(~np.isfinite(found).all(axis=1))
            if len(wrong):
                job.error = EngineError(
                    f"prompt {wrong[0]} has hidden states that are no finite numbers; the weights "
                    "or the dtype do not suit the model"
                )
            else:
                job.vectors = found
            ended.append(job)
        return ended

    def _request(self, index: int, text: Text, adapter: ServedAdapter | None) -> Request:
        config = self._engine.scheduler.config
        request = Request(index, list(text.token_ids), self._params, adapter=adapter)
        most = min(config.max_length, config.num_blocks * config.block_size)
        why = "the cache's length"
        if config.placing is not None:
            places = config.placing.of(request.prompt_token_ids)
            request.places = places if text.second is None else places._replace(second=text.second)
            if places.runs_whole and config.max_num_batched_tokens < most:
                most, why = config.max_num_batched_tokens, "max_num_batched_tokens: it runs whole"
        if not 0 < request.num_tokens <= most:
            raise UserError(
                f"prompt {index} has {request.num_tokens} tokens (allowed: 1 to {most}, {why}); "
                "shorten it"
            )
        self._pages.check_fits(request)
        return request

    def _no_room(self, request: Request) -> UserError:
        scheduler = self._engine.scheduler
        num_blocks = num_blocks_for(request.num_tokens, scheduler.config.block_size)
        return UserError(
            f"a prompt of {request.num_tokens} tokens needs {num_blocks} blocks of the cache, and "
            f"{scheduler.block_manager.num_free_blocks} are free; wait until requests have ended, "
            "or raise num_cache_blocks"
        )

    def _take(self) -> list[_Waiting]:
        """The next texts, in order, with their blocks: as many as a step holds, or a longer one.

        So a text's tokens run in the same parts whatever is beside it.
        """
        config, taken = self._engine.scheduler.config, list[_Waiting]()
        left = config.max_num_batched_tokens
        try:
            while self._queue and len(taken) < config.max_num_seqs:
                text = self._queue[0]
                if taken and text.request.num_tokens > left:
                    break
                try:
                    if not (text.request.block_ids or self._reserve(text)):
                        break
                except Exception:
                    if not taken:  # else it is the first of the next round, and fails there
                        raise
                    break
                taken.append(self._queue.popleft())
                left -= text.request.num_tokens
        except Exception:
            self._give_back(taken)
            self._queue.extendleft(reversed(taken))
            raise
        return taken

    def _reserve(self, text: _Waiting, num_spare: int = 0) -> bool:
        """Takes a text's blocks, and its adapter's pages; False where there is no room.

        num_spare: blocks to leave free.
        """
        manager, request = self._engine.scheduler.block_manager, text.request
        shared, num_cached = list[int](), 0
        if text.job.pooler.reads_last and request.shares_blocks:
            digests, salt = request.block_digests, request.block_salt
            shared, num_cached = manager.match_prefix(request.token_ids, digests, salt)
        num_blocks = num_blocks_for(request.num_tokens, manager.block_size) - len(shared)
        need = Need(request, shared, num_cached, num_blocks, 0)
        has_blocks = manager.can_allocate(num_blocks + num_spare, shared)
        if not (has_blocks and self._pages.has_room(need)):
            return False
        self._pages.reserve(need)
        manager.acquire(shared)
        request.block_ids = shared + manager.allocate(num_blocks)
        request.num_computed_tokens = request.num_cached_tokens = num_cached
        request.num_published_blocks = len(shared)
        request.status = RequestStatus.RUNNING
        self._engine.scheduler.guests.add(request)
        text.pooled.clear()
        return True

    def _give_back(self, texts: Iterable[_Waiting]) -> None:
        for text in texts:
            if text.request.block_ids:
                self._engine.scheduler.block_manager.free(text.request.block_ids)
                text.request.block_ids = []
                text.request.status = RequestStatus.WAITING
                self._engine.scheduler.guests.remove(text.request)
                self._pages.release(text.request)

    def _run(self, texts: Sequence[_Waiting]) -> None:
        """All steps of a round; adds the results to the jobs."""
        running = list(texts)
        while running:
            left, spans = self._engine.scheduler.config.max_num_batched_tokens, []
            for text in running:
                request = text.request
                length = min(left, request.num_tokens - request.num_computed_tokens)
                start = request.num_computed_tokens
                is_last = start + length == request.num_tokens
                wants = is_last and text.job.pooler.answers is not None
                spans.append(ScheduledSpan(request, length, start, request.block_ids, wants))
                left -= length
            self._step(running, spans)
            running = [text for text in running if text.number not in text.job.found]

    def _step(self, texts: Sequence[_Waiting], spans: Sequence[ScheduledSpan]) -> None:
        engine = self._engine
        taps = (FINAL,) if any(text.job.pooler.answers is None for text in texts) else ()
        outputs = engine.runner.run(engine.inputs(spans), taps)
        logits = None
        if outputs.logits is not None:
            logits = outputs.logits.cpu().astype("float32").numpy()
        engine.stats.num_steps += 1
        engine.stats.num_scheduled_tokens += sum(span.num_tokens for span in spans)
        self._pool(texts, spans, outputs.hidden.get(FINAL), logits)

    def _pool(
        self,
        texts: Sequence[_Waiting],
        spans: Sequence[ScheduledSpan],
        hidden: Tensor | None,
        logits: Vectors | None,
        first: int = 0,
    ) -> None:
        """Adds what a step made of its texts to their jobs. first: token of the first span."""
        wanted: list[Sequence[int]] = []
        for text, span in zip(texts, spans, strict=True):
            pools = text.job.pooler.answers is None and text.request.block_ids
            wanted.append(text.pooled.wanted(span.start, span.num_tokens) if pools else ())
        begins = np.cumsum([first, *(span.num_tokens for span in spans)])
        places = [b + place for b, own in zip(begins, wanted, strict=False) for place in own]
        rows = self._host_rows(hidden, places)
        taken = row = 0
        for text, span, own in zip(texts, spans, wanted, strict=True):
            request, job = text.request, text.job
            if not request.block_ids:
                continue  # aborted while it ran
            if job.pooler.answers is None:
                text.pooled.add(rows[taken : taken + len(own)], span.start, span.num_tokens)
                taken += len(own)
            request.num_computed_tokens += span.num_tokens
            if request.num_computed_tokens == request.num_tokens:
                if job.pooler.answers is None:
                    job.found[text.number] = text.pooled.result()
                else:
                    assert logits is not None
                    job.found[text.number] = job.pooler.of_logits(logits[row])
                self._engine.stats.num_prompt_tokens += request.num_tokens
                self._engine.stats.num_prefix_hit_tokens += request.num_cached_tokens
                self._publish(request)
            row += span.samples

    def _publish(self, request: Request) -> None:
        if request.shares_blocks:
            manager = self._engine.scheduler.block_manager
            manager.publish(
                *(request.block_ids, request.token_ids, request.block_digests),
                *(request.num_published_blocks, request.num_tokens // manager.block_size),
                request.block_salt,
            )
