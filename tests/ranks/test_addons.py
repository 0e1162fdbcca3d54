"""Adapters and tuned prefixes of requests: the front reads them, each rank has its part."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.adapters.weights import PagedLinear, adapted_plans
from predict.device import library
from predict.engine.addons import WritePrefix
from predict.errors import UserError
from predict.loading.model import plan_of, read_spec
from predict.nn.cuts import local_plan, local_spec
from predict.ranks.addons import RankAddons, RanksShelf, prefix_writer
from predict.ranks.messages import Down
from predict.ranks.shared import message, opened
from tests.support import tiny
from tests.support.adapters import write_adapter
from tests.support.prefixes import TINY, write_prefix

PROMPTS = [[5, 9, 11, 30, 7], [101, 3]]


class Shelf:
    """See predict.adapters.weights.Shelf."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def made(self, values: Any) -> Any:
        return values

    def write(self, made: Any, pages: Any) -> None:
        self.written.append((made, pages))


def writer(to: list[Any]) -> WritePrefix:
    return lambda values, slots: to.append((values, slots))


class Ranks:
    """Two ranks of a tiny model, in this process."""

    def __init__(self, folder: Path):
        spec, reader = read_spec(tiny.write(folder))
        self.plan, _ = plan_of(spec, reader)
        specs = [local_spec(spec, rank, 2) for rank in range(2)]
        self.plans = [local_plan(self.plan, own) for own in specs]
        self.shelves, self.prefixes = [Shelf(), Shelf()], [list[Any](), list[Any]()]
        self.addons = [
            RankAddons(own, cast("Any", SimpleNamespace(shelf=shelf, plan=plan)), writer(to))
            for own, shelf, plan, to in zip(
                specs, self.shelves, self.plans, self.prefixes, strict=True
            )
        ]

    def ask(self, kind: Down, arrays: Any) -> None:
        data = memoryview(b"".join(message(kind, arrays)))
        for each in self.addons:
            number, found = opened(data)
            each.answers[Down(number)](found)


def test_each_rank_writes_its_part_of_an_adapter(tmp_path: Path) -> None:
    ranks, shelf = Ranks(tmp_path / "model"), RanksShelf("float32")
    shelf.ranks = ranks  # type: ignore[assignment]
    linears = [linear for _, _, linear in adapted_plans(ranks.plan)]
    whole: list[PagedLinear | None] = [
        PagedLinear(
            np.arange(2 * 8 * each.in_features, dtype=np.float32).reshape(2, 1, 8, -1),
            np.arange(2 * 8 * each.out_features, dtype=np.float32).reshape(2, 8, -1),
        )
        for each in linears
    ]
    whole[0] = None
    shelf.write(shelf.made(whole), [4, 2])
    for own, plan in zip(ranks.shelves, ranks.plans, strict=True):
        ((values, pages),) = own.written
        assert pages == [4, 2]
        assert values[0] is None
        for all_of, part, (_, _, linear) in zip(whole, values, adapted_plans(plan), strict=True):
            if all_of is None:
                continue
            rows, columns = (
                np.concatenate([np.arange(*ends) for ends in ranges or ((0, count),)])
                for ranges, count in (
                    (linear.rows, all_of.b.shape[2]),
                    (linear.columns, all_of.a.shape[3]),
                )
            )
            np.testing.assert_array_equal(part.a, all_of.a[..., columns])
            np.testing.assert_array_equal(part.b, all_of.b[..., rows])
            assert (len(rows), len(columns)) != (all_of.b.shape[2], all_of.a.shape[3])


def test_values_that_no_page_holds_are_refused_before_they_are_sent() -> None:
    wide = PagedLinear(np.full((1, 1, 8, 4), 1e6, np.float32), np.zeros((1, 8, 4), np.float32))
    with pytest.raises(UserError, match="float16"):
        RanksShelf("float16").made([None, wide])


def test_each_rank_writes_its_heads_of_a_prefix(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "model")
    num_layers, num_heads, size = TINY
    values = np.arange(num_layers * 2 * num_heads * 3 * size, dtype=np.float32)
    values = values.reshape(num_layers, 2, num_heads, 3, size)
    prefix_writer(ranks)(values, np.array([9, 8, 4], np.int32))  # type: ignore[arg-type]
    assert all(slots.tolist() == [9, 8, 4] for ((_, slots),) in ranks.prefixes)
    parts = [part for ((part, _),) in ranks.prefixes]
    np.testing.assert_array_equal(np.concatenate(parts, axis=2), values)


@pytest.mark.slow
@pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
@pytest.mark.parametrize("inference_model", [True, False])
def test_adapters_and_prefixes_come_and_go_as_with_one_rank(
    tmp_path: Path, inference_model: bool
) -> None:
    tiny.write(tmp_path / "model")
    for name, rank in (("all", 4), ("more", 13)):
        write_adapter(tmp_path / name, tiny.CONFIG, rank, seed=rank)
    write_prefix(tmp_path / "prefix", TINY, 37)

    def answers(num_ranks: int) -> list[Any]:
        llm = LLM(
            tmp_path / "model",
            dtype="float32",
            device="cpu",
            inference_model=inference_model,
            tensor_parallel_degree=num_ranks,
            rank_timeout=60.0,
            max_length=96,
            lora_modules=(f"all={tmp_path / 'all'}",),
            prefix_path=(f"tuned={tmp_path / 'prefix'}",),
            allow_adapter_updates=True,
            max_loras=1,
            num_cache_blocks=20,
        )
        llm.load_adapter("more", tmp_path / "more")
        llm.load_prefix("late", tmp_path / "prefix")
        found = []
        for name in (None, "all", "more", "tuned", "late", "all"):  # one has pages at a time
            params = SamplingParams(temperature=0.0, max_new_tokens=8, adapter=name)
            found.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)])
        llm.unload_adapter("all")
        llm.unload_prefix("late")
        with pytest.raises(UserError, match="late"):
            llm.generate(PROMPTS, SamplingParams(adapter="late"))
        return found

    wanted = answers(1)
    assert answers(2) == wanted
    assert wanted[3] == wanted[4]
    assert len({str(each) for each in wanted}) == 4
