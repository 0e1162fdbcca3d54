"""Vectors and scores of texts: rounds of steps without a choice, between the steps of answers.

A round runs some texts from their first token to their last, and gives back all that it took, so
that nothing of a text is held while answers run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from predict.adapters.pool import ServedAdapter
from predict.engine.block_manager import num_blocks_for
from predict.engine.engine import Engine
from predict.engine.request_state import Request
from predict.engine.resources import AdapterPages, Need
from predict.engine.scheduled import ScheduledSpan
from predict.errors import EngineError, UserError
from predict.nn.decoder import FINAL
from predict.nn.pooling import Pooled, Pooler, Vectors
from predict.request import SamplingParams


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
    num_skipped: int


class Embedder:
    """A queue of texts in front of an engine. Not thread-safe."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._queue: deque[_Waiting] = deque()
        self._pages = AdapterPages(engine.scheduler.config.adapters)

    @property
    def is_busy(self) -> bool:
        """Whether texts wait."""
        return bool(self._queue)

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
        waiting = [
            _Waiting(job, index, self._request(index, text, adapter), text.num_skipped)
            for index, text in enumerate(texts)
        ]
        self._queue += waiting
        return job

    def abort(self, job: VectorJob) -> None:
        """Takes a job's texts out of the queue."""
        self._queue = deque(each for each in self._queue if each.job is not job)
        self._engine.scheduler.make_room(False)

    def step(self, waits: bool = True) -> list[VectorJob]:
        """Runs a round, and returns the jobs that have ended; failures are errors of jobs.

        Raises EngineError where nothing can run any more.

        waits: a text waits for the blocks that running answers hold, and no answer joins them; and
        for its adapter's file, while they go on. Without answers the file is waited for here.
        """
        if not self._queue:
            return []
        waits = waits and self._engine.scheduler.num_running > 0
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
        request = Request(index, list(text.token_ids), SamplingParams(), adapter=adapter)
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
                    if not self._reserve(text):
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

    def _reserve(self, text: _Waiting) -> bool:
        """Takes a text's blocks, and its adapter's pages; False where there is no room."""
        manager, request = self._engine.scheduler.block_manager, text.request
        shared, num_cached = list[int](), 0
        if text.job.pooler.reads_last and request.shares_blocks:
            digests, salt = request.block_digests, request.block_salt
            shared, num_cached = manager.match_prefix(request.token_ids, digests, salt)
        num_blocks = num_blocks_for(request.num_tokens, manager.block_size) - len(shared)
        need = Need(request, shared, num_cached, num_blocks, 0)
        if not (manager.can_allocate(num_blocks, shared) and self._pages.has_room(need)):
            return False
        self._pages.reserve(need)
        manager.acquire(shared)
        request.block_ids = shared + manager.allocate(num_blocks)
        request.num_computed_tokens = request.num_cached_tokens = num_cached
        request.num_published_blocks = len(shared)
        return True

    def _give_back(self, texts: Sequence[_Waiting]) -> None:
        for text in texts:
            if text.request.block_ids:
                self._engine.scheduler.block_manager.free(text.request.block_ids)
                text.request.block_ids = []
                self._pages.release(text.request)

    def _run(self, texts: Sequence[_Waiting]) -> None:
        """All steps of a round; adds the results to the jobs."""
        pooled = [
            Pooled(text.job.pooler, text.request.num_tokens, text.num_skipped) for text in texts
        ]
        running = list(zip(texts, pooled, strict=True))
        while running:
            left, spans = self._engine.scheduler.config.max_num_batched_tokens, []
            for text, _ in running:
                request = text.request
                length = min(left, request.num_tokens - request.num_computed_tokens)
                start = request.num_computed_tokens
                is_last = start + length == request.num_tokens
                wants = is_last and text.job.pooler.answers is not None
                spans.append(ScheduledSpan(request, length, start, request.block_ids, wants))
                left -= length
            self._step(running, spans)
            running = [pair for pair in running if pair[0].number not in pair[0].job.found]

    def _step(
        self, running: Sequence[tuple[_Waiting, Pooled]], spans: Sequence[ScheduledSpan]
    ) -> None:
        engine = self._engine
        taps = (FINAL,) if any(p.pooler.answers is None for _, p in running) else ()
        outputs = engine.runner.run(engine.inputs(spans), taps)
        hidden = logits = None
        if taps:
            hidden = outputs.hidden[FINAL].astype("float32").cpu().numpy()
        if outputs.logits is not None:
            logits = outputs.logits.astype("float32").cpu().numpy()
        engine.stats.num_steps += 1
        engine.stats.num_scheduled_tokens += sum(span.num_tokens for span in spans)
        begin = row = 0
        for (text, pool), span in zip(running, spans, strict=True):
            if hidden is not None and pool.pooler.answers is None:
                pool.add(hidden[begin : begin + span.num_tokens], span.start)
            begin += span.num_tokens
            request = text.request
            request.num_computed_tokens += span.num_tokens
            if request.num_computed_tokens < request.num_tokens:
                continue
            if pool.pooler.answers is None:
                text.job.found[text.number] = pool.result()
            else:
                assert logits is not None
                text.job.found[text.number] = pool.pooler.of_logits(logits[row])
            row += span.samples
            engine.stats.num_prompt_tokens += request.num_tokens
            engine.stats.num_prefix_hit_tokens += request.num_cached_tokens
            self._publish(request)

    def _publish(self, request: Request) -> None:
        if request.shares_blocks:
            manager = self._engine.scheduler.block_manager
            manager.publish(
                *(request.block_ids, request.token_ids, request.block_digests),
                *(request.num_published_blocks, request.num_tokens // manager.block_size),
                request.block_salt,
            )
