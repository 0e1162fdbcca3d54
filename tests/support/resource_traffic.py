"""Random traffic of requests with adapters and with tuned prefixes, which come and go.

See tests.support.scheduler_traffic. What a request computes depends on its adapter, so that a block
of another's shows as another hash.
"""

from __future__ import annotations

import random

import numpy as np

from predict.adapters.pool import AdapterPool, ServedAdapter
from predict.adapters.prefixes import NO_PREFIX, ServedPrefix, draft_table
from predict.engine.batch import adapted, span_inputs
from predict.engine.beams import Candidates
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.errors import UserError
from predict.nn.inputs import ADAPTED
from predict.request import SamplingParams
from tests.support.scheduler_traffic import Simulation, contents, prefix_hashes

NUM_NAMES = 7
MOST_UNFINISHED = 24  # a longer queue is looked through at every step, and finds nothing more
Sampled = list[int | list[int] | Candidates]


class FakeStore:
    """Pages that hold the keys of the adapters that were written there."""

    def __init__(self, num_pages: int, max_pages: int) -> None:
        self.pool = AdapterPool(num_pages, max_pages, self.write)
        self.keys = [0] * num_pages

    def write(self, adapter: ServedAdapter, pages: list[int]) -> None:
        for page in pages:
            self.keys[page] = adapter.key


class AdapterSimulation(Simulation):
    """Adapters of seven names come and go; most requests name one."""

    def __init__(self, limits: SchedulerConfig, rng: random.Random) -> None:
        super().__init__(limits, rng)
        assert limits.adapters is not None
        self.pool = limits.adapters
        self.store: FakeStore = limits.adapters._write.__self__  # type: ignore[attr-defined]
        self.adapters: list[ServedAdapter] = []
        self.num_loaded = self.num_blocked = 0
        self.adapter: ServedAdapter | None = None  # of the next request

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        while len(self.unfinished) > MOST_UNFINISHED:
            if self.ahead:
                self.step_ahead()
            else:
                self.step(drafts=False)
        self._change()
        self.adapter = self.rng.choice([None, *self.adapters])
        before = len(self.requests)
        super().add(prompt, params)
        if len(self.requests) > before and params.num_beams == 1 and self.rng.random() < 0.2:
            super().add(prompt, params)  # another sample of it
            self.requests[before + 1].leader = self.requests[before]

    def abort(self, request_id: int) -> None:
        super().abort(self.rng.choice([request_id, *self.unfinished]))

    def _change(self) -> None:
        """Loads an adapter, or unloads one, whoever has it."""
        if len(self.adapters) == NUM_NAMES or (self.adapters and self.rng.random() < 0.1):
            gone = self.adapters.pop(self.rng.randrange(len(self.adapters)))
            self.pool.forget(gone)
        if not self.adapters or self.rng.random() < 0.2:
            num_pages = self.rng.randint(1, self.pool.max_pages)
            targets = tuple(self.rng.random() < 0.7 for _ in ADAPTED)
            self.num_loaded += 1
            self.adapters.append(ServedAdapter(str(self.num_loaded), num_pages, targets))

    def _request(self, request_id: int, prompt: list[int], params: SamplingParams) -> Request:
        return Request(request_id, prompt, params, adapter=self.adapter)

    def _execute(self, batch: ScheduledBatch) -> Sampled:
        inputs = adapted(span_inputs(batch.spans, self.limits.block_size), batch.spans, self.pool)
        ids, pages = np.asarray(inputs.adapter_ids), np.asarray(inputs.adapter_pages)
        ends = np.asarray(inputs.cu_seqlens_q)
        for index, span in enumerate(batch.spans):
            adapter = span.request.adapter
            rows = set(ids[ends[index] : ends[index + 1]])
            assert len(rows) == 1
            row = rows.pop()
            if adapter is None:
                assert row == -1
                continue
            for changes, found in zip(adapter.targets, pages[row], strict=True):
                own = [page for page in found if page >= 0]
                assert len(own) == adapter.num_pages * changes
                assert len(set(own)) == len(own)
                assert {self.store.keys[page] for page in own} <= {adapter.key}
        return super()._execute(batch)

    def _awaits_more(self, head: Request) -> bool:
        wanted, free = head.adapter, self.pool.num_free_pages
        if wanted is not None and wanted not in self.pool._pages and wanted.num_pages > free:
            return True
        return super()._awaits_more(head)

    def check(self) -> None:
        super().check()
        self.scheduler.check()
        waiting = self.scheduler._waiting
        head = waiting[0].adapter if waiting else None
        self.num_blocked += head is not None and head.num_pages > self.pool.num_free_pages


def with_adapter(request_id: int, adapter: ServedAdapter, max_new_tokens: int = 4) -> Request:
    params = SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)
    return Request(request_id, [1, 2, 3, 4, 5], params, adapter=adapter)


class PrefixSimulation(Simulation):
    """Requests with one of a few prefixes, or none."""

    num_loaded = num_refused = 0

    def __init__(self, limits: SchedulerConfig, rng: random.Random) -> None:
        super().__init__(limits, rng)
        self.prefixes = [
            self.loaded(name, num_tokens, is_late=False)
            for name, num_tokens in zip("abc", (1, limits.block_size, 7), strict=True)
        ]

    def loaded(self, name: str, num_tokens: int, is_late: bool) -> ServedPrefix:
        prefix = self.scheduler.pin_prefix(name, num_tokens, is_late)
        hashes = prefix_hashes(contents(prefix))
        for place, value in enumerate(hashes):
            self.cache.slots[self.cache.slot(prefix.all_block_ids, place)] = value
        return prefix

    def prefix(self) -> ServedPrefix:
        return self.rng.choice([NO_PREFIX, *self.prefixes])

    @property
    def pinned(self) -> set[int]:
        had = {each.prefix for each in self.unfinished.values()} | set(self.prefixes)
        return {block for prefix in had for block in prefix.all_block_ids}

    def check(self) -> None:
        super().check()
        self.scheduler.check()
        if self.limits.for_drafts:
            for each in self.unfinished.values():
                own = draft_table(each.block_ids, each.prefix)
                assert len(own) * self.limits.block_size >= each.num_computed_tokens
                assert not set(own) & self.pinned


class ComingAndGoing(PrefixSimulation):
    """Prefixes are loaded and unloaded between arrivals, whatever runs with them."""

    def add(self, prompt: list[int], params: SamplingParams) -> None:
        if self.prefixes and self.rng.random() < 0.3:
            prefix = self.prefixes.pop(self.rng.randrange(len(self.prefixes)))
            self.scheduler.unpin_prefix(prefix)
        if self.rng.random() < 0.3:
            self.num_loaded += 1
            try:
                made = self.loaded(f"{self.num_loaded}", self.rng.randint(1, 9), is_late=True)
                self.prefixes.append(made)
            except UserError:
                self.num_refused += 1
        self.check()
        super().add(prompt, params)

    def finish(self) -> None:
        super().finish()
        for prefix in self.prefixes:
            self.scheduler.unpin_prefix(prefix)
        assert self.scheduler.block_manager.num_used_blocks == 0
