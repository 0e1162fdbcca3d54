"""Random traffic on a tiny model whose tuned prefixes come and go: no block is lost, no text wrong.

What a request computes depends on its prefix, so that a block of another's shows in its tokens.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from predict import LLM, SamplingParams
from predict.device import library
from predict.engine.samples import Samples
from predict.errors import UserError
from tests.support import tiny
from tests.support.drafts import draft_always
from tests.support.prefixes import TINY, write_prefix

LENGTHS = (1, 5, 16, 21, 32, 40)  # tokens of the prefixes that there are, of blocks of 16
NAMES = "abcd"
MOST_UNFINISHED = 10
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "inference_model": True,
    "attention": "append",
    "block_size": 16,
    "max_length": 96,
    "batch_size": 5,
}


class Asked(NamedTuple):
    """An answer that was asked for; params name its prefix as it was called then."""

    samples: Samples
    length: int | None  # of its prefix
    prompt: list[int]
    params: SamplingParams


class Traffic:
    """An LLM, what is loaded in it, and what was asked of it."""

    def __init__(self, llm: LLM, folders: dict[int, Path], rng: random.Random) -> None:
        self.llm, self.folders, self.rng = llm, folders, rng
        self.loaded: dict[str, int] = {}
        self.asked: list[Asked] = []
        self.unfinished: list[Asked] = []
        self.num_loads = self.num_refused = self.num_unloads_in_use = 0

    def arrive(self) -> None:
        if len(self.unfinished) >= MOST_UNFINISHED:
            return
        rng = self.rng
        text = random.Random(rng.randrange(3)).choices(range(4, tiny.CONFIG["vocab_size"]), k=50)
        prompt = text[: rng.randint(1, 50)] + rng.choices(
            range(4, tiny.CONFIG["vocab_size"]), k=rng.randrange(3)
        )
        name = rng.choice([None, *self.loaded])
        greedy: dict[str, Any] = {"temperature": 0.0}
        samples = {"temperature": 0.9, "n": rng.choice([1, 2]), "seed": rng.randrange(1000)}
        params = SamplingParams(
            max_new_tokens=rng.choice([1, 4, 20, 40]),
            ignore_eos=True,
            adapter=name,
            **rng.choice([greedy, greedy, samples]),
        )
        length = None if name is None else self.loaded[name]
        if len(prompt) + (length or 0) > 95:
            return
        made = self.llm.samples(prompt, params)
        self.llm.queue([made])
        self.asked.append(Asked(made, length, prompt, params))
        self.unfinished.append(self.asked[-1])

    def abort(self) -> None:
        if self.unfinished:
            self.llm.abort([self.rng.choice(self.unfinished).samples])

    def load(self) -> None:
        name, length = self.rng.choice(NAMES), self.rng.choice(LENGTHS)
        if name in self.loaded:
            return
        try:
            self.llm.load_prefix(name, self.folders[length])
        except UserError as error:
            if "raise num_cache_blocks" not in str(error):
                raise
            self.num_refused += 1
        else:
            self.loaded[name] = length
            self.num_loads += 1

    def unload(self) -> None:
        if self.loaded:
            name = self.rng.choice(list(self.loaded))
            before = self.llm.stats().num_prefix_blocks
            self.llm.unload_prefix(name)
            del self.loaded[name]
            self.num_unloads_in_use += self.llm.stats().num_prefix_blocks == before

    def step(self) -> None:
        self.llm.step()

    def event(self) -> None:
        kinds = (self.step, self.arrive, self.abort, self.load, self.unload)
        (happens,) = self.rng.choices(kinds, (60, 20, 4, 8, 8))
        happens()
        self.llm.engine.scheduler.check()
        self.unfinished = [each for each in self.unfinished if not each.samples.is_finished]

    def finish(self) -> None:
        while self.unfinished:
            self.step()
            self.unfinished = [each for each in self.unfinished if not each.samples.is_finished]
        for name in self.loaded:
            self.llm.unload_prefix(name)
        self.llm.engine.scheduler.check()
        assert self.llm.stats().num_used_blocks == self.llm.stats().num_prefix_blocks == 0


@pytest.mark.parametrize("num_events", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", [None, "lookahead", "draft_model"])
def test_any_traffic_with_prefixes_that_come_and_go_is_answered_as_alone(
    compiled: library.Library, tmp_path: Path, method: str | None, num_events: int
) -> None:
    model = tiny.write(tmp_path / "model")
    folders = {length: write_prefix(tmp_path / str(length), TINY, length) for length in LENGTHS}
    drafts: dict[str, Any] = {"speculate_method": method}
    if method is not None:
        drafts["speculate_max_draft_token_num"] = 4
    if method == "draft_model":
        drafts["draft_model_name_or_path"] = str(model)
    llm = LLM(model, **SETTINGS, **drafts, allow_adapter_updates=True, num_cache_blocks=15)
    draft_always(llm)
    traffic = Traffic(llm, folders, random.Random(num_events))
    for _ in range(num_events):
        traffic.event()
    traffic.finish()
    named = tuple(f"{length}={folder}" for length, folder in folders.items())
    alone = LLM(model, **SETTINGS, prefix_path=named)
    for each in traffic.asked:
        adapter = None if each.length is None else str(each.length)
        (wanted,) = alone.generate([each.prompt], replace(each.params, adapter=adapter))
        for found, answer in zip(each.samples.output().outputs, wanted.outputs, strict=True):
            assert found.finish_reason in ("abort", answer.finish_reason)
            if found.finish_reason == "abort":
                assert found.token_ids == answer.token_ids[: len(found.token_ids)]
            else:
                assert found.token_ids == answer.token_ids
    stats = llm.stats()
    assert (stats.num_draft_tokens > 0) == (method is not None)
    assert traffic.num_loads > num_events // 40
    assert traffic.num_unloads_in_use > num_events // 200
    if num_events == 2000:
        assert traffic.num_refused > 10
        assert stats.num_preemptions > 0
        assert stats.num_prefix_hit_tokens > 1000
