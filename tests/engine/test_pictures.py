"""Passes over pictures go on beside steps, and steps read the rows of their own pictures alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from predict import SamplingParams
from predict.engine.batch import span_inputs
from predict.engine.picture_rows import PictureRows
from predict.engine.pictures import Eyes, PassLimits
from predict.engine.request_state import Request, RequestStatus
from predict.engine.scheduled import ScheduledBatch, SchedulerConfig
from predict.engine.scheduler import Scheduler
from predict.images.areas import AreaPixels
from predict.images.placed import Picture, resized_picture, with_pictures

PIXELS = AreaPixels(patch_size=4)
PLACEHOLDER, NUM_LAYERS = 9, 6


def picture(number: int) -> Picture:
    """A picture of 1 to 12 tokens, the same for the same number."""
    values = np.zeros((8 * (1 + number % 3), 8 * (1 + number % 4), 3), np.uint8)
    return resized_picture(number.to_bytes(32, "little"), values, PIXELS)


class Tower:
    """Writes down which picture's cell lies in which row."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[bytes, int]] = {}
        self.passes: list[tuple[int, int]] = []  # pictures, runs of layers
        self.broken: set[bytes] = set()

    def encode(
        self, pictures: Sequence[Picture], rows: Sequence[Any], max_layers: int | None = None
    ) -> Iterator[None]:
        runs = -(-NUM_LAYERS // (max_layers or NUM_LAYERS))
        self.passes.append((len(pictures), runs))
        for _ in range(runs):
            if any(each.digest in self.broken for each in pictures):
                raise RuntimeError("no such picture")
            yield
        for each, own in zip(pictures, rows, strict=True):
            self.content |= {int(row): (each.digest, cell) for cell, row in enumerate(own)}


class Loop:
    """The engine's loop over a scheduler, with made-up tokens."""

    def __init__(self, budget: int = 20, **settings: Any) -> None:
        self.rows, self.tower = PictureRows(64), Tower()
        self.eyes = Eyes(
            *(self.rows, self.tower.encode, 1000),
            PassLimits(200, 64, lambda cells: 1, NUM_LAYERS, budget),
        )
        given = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "num_blocks": 60, **settings}
        self.scheduler = Scheduler(
            SchedulerConfig(max_length=80, block_size=4, pictures=self.rows, **given)
        )
        self.number = 0

    def add(self, *pictures: int, before: int = 1, tokens: int = 6) -> Request:
        ids = [1 + i % 7 for i in range(before)]
        for each in pictures:
            ids += [PLACEHOLDER, 1 + each % 7]
        ids, placed = with_pictures([*ids, 2], [picture(n) for n in pictures], PLACEHOLDER)
        params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        request = Request(self.number, ids, params, pictures=placed)
        self.number += 1
        self.scheduler.add(request)
        return request

    def step(self) -> ScheduledBatch | None:
        self.eyes.look(bool(self.scheduler.decoding))
        while (batch := self.scheduler.schedule()) is None:
            if not self.eyes.finish():
                return None
        inputs = self.eyes.seen(span_inputs(batch.spans, 4), batch.spans)
        for span, first in zip(batch.spans, inputs.cu_seqlens_q.tolist(), strict=False):
            self.check_read(span, first, inputs)
        self.scheduler.update(batch, [3] * batch.num_samples)
        return batch

    def check_read(self, span: Any, first: int, inputs: Any) -> None:
        """Each token reads its own cell of its own picture, and text reads none."""
        wanted = {
            each.start + cell: (each.picture.digest, cell)
            for each in (span.request.pictures.placed if span.request.pictures else ())
            for cell in range(each.picture.num_tokens)
        }
        for offset in range(span.num_tokens):
            row = -1 if inputs.image_rows is None else int(inputs.image_rows[first + offset])
            got = self.tower.content[row] if row >= 0 else None
            assert got == wanted.get(span.start + offset)


def test_a_pass_is_cut_while_others_decode_and_prompts_wait_for_it() -> None:
    loop = Loop(budget=8)
    first = loop.add(before=3, tokens=30)
    loop.step()
    asked = [loop.add(11, before=4), loop.add(10), loop.add(8)]
    lengths = []
    while any(request.status is not RequestStatus.FINISHED for request in asked):
        before = first.num_output_tokens
        batch = loop.step()
        assert batch is not None
        assert first.num_output_tokens == before + 1  # decoding goes on in each step
        lengths.append(batch.num_tokens)
    # 48 patches and those that came with them, of 8 patches a step: one layer at a time.
    assert loop.tower.passes[0][1] == NUM_LAYERS
    assert sum(count for count, _ in loop.tower.passes) == 3
    assert max(lengths) > 5


def test_pictures_that_wait_are_packed_where_nothing_decodes() -> None:
    loop = Loop(max_num_batched_tokens=64)
    for number in (11, 10, 9, 11):
        loop.add(number)
    loop.step()
    assert loop.tower.passes == [(3, 1)]


def test_an_abort_amid_a_pass_keeps_its_rows_until_it_ends() -> None:
    loop = Loop(budget=8)
    loop.add(before=3, tokens=30)
    loop.step()
    gone = loop.add(11)
    for _ in range(3):
        loop.step()
    assert loop.rows.held(picture(11)).in_pass
    loop.scheduler.abort(gone.request_id)
    other = loop.add(7, 5)
    while other.status is not RequestStatus.FINISHED:
        loop.step()
        loop.scheduler.check()
    assert loop.rows.held(picture(11)).is_encoded  # it is there for the next one
    assert loop.rows.has_room(loop.add(11), 0)


def test_a_picture_that_fails_is_told_by_the_step_that_reads_it() -> None:
    loop = Loop(budget=400)
    loop.add(before=3, tokens=30)
    loop.step()
    good, bad = loop.add(11), loop.add(10)
    loop.tower.broken.add(picture(10).digest)
    told = 0
    for _ in range(12):
        try:
            loop.step()
        except RuntimeError:
            told += 1
            loop.scheduler.abort(bad.request_id)
    assert told == 1
    assert good.num_output_tokens == 6
    loop.scheduler.check()


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 24}, {"chunked_prefill": False}])
def test_random_arrivals_and_aborts_read_their_own_rows(
    settings: dict[str, Any],
) -> None:
    """10,000 by hand: python -m tests.engine.test_pictures 10000."""
    meet_random_traffic(settings, 150)


def meet_random_traffic(settings: dict[str, Any], count: int) -> None:
    """So many requests that come and are aborted at random."""
    rng, loop = np.random.default_rng(48), Loop(budget=12, **settings)
    live: list[Request] = []
    ends: Counter[str] = Counter()
    while loop.number < count or live:
        while loop.number < count and len(live) < 10 and rng.random() < 0.6:
            numbers = rng.integers(0, 40, rng.integers(0, 4)).tolist()
            before, tokens = int(rng.integers(1, 12)), int(rng.integers(1, 9))
            live.append(loop.add(*numbers, before=before, tokens=tokens))
        if live and rng.random() < 0.08:
            loop.scheduler.abort(live[int(rng.integers(len(live)))].request_id)
        loop.step()
        ends.update(str(r.finish_reason) for r in live if r.status is RequestStatus.FINISHED)
        live = [r for r in live if r.status is not RequestStatus.FINISHED]
        if loop.number % 16 == 0:
            loop.scheduler.check()
    loop.eyes.look(False)
    loop.scheduler.check()
    assert ends["abort"] > 0
    assert sum(ends.values()) == count
    assert any(runs > 1 for _, runs in loop.tower.passes)
    assert any(packed > 1 for packed, _ in loop.tower.passes)


if __name__ == "__main__":
    for given in ({}, {"num_blocks": 24}, {"chunked_prefill": False}):
        meet_random_traffic(given, int(sys.argv[1]))
        print(given, "no row lost, none read by another")
