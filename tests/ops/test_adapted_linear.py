"""A linear with what adapters add, and the ids of rows: the compiled operators and their twins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict.adapters.weights import packed
from predict.device import library
from predict.nn.adapter_pages import PACKED_IN, PACKED_OUT, PAGE_RANKS
from predict.nn.blocks import Linear, LowRankPages
from predict.nn.inputs import ADAPTED
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.tolerances import assert_close

paddle = library.import_paddle()

NUM_PAGES, NUM_ADAPTERS, MAX_PAGES = 6, 3, 2


class Case:
    """A linear of parts, and adapters of none, one and two pages for each of ADAPTED."""

    def __init__(self, dtype: str, width: int, sizes: tuple[int, ...], num_rows: int) -> None:
        self.dtype = dtype
        generator = self.generator = np.random.default_rng(width + num_rows)
        self.num_out = sum(sizes)
        self.weight = self.tensor(self.num_out, width)
        self.bias = self.tensor(self.num_out)
        self.a = self.tensor(NUM_PAGES, len(sizes), PAGE_RANKS, width)
        self.b = self.tensor(NUM_PAGES, PAGE_RANKS, self.num_out)
        self.sizes, self.width = sizes, width
        self.x = self.tensor(num_rows, width)
        pages = np.full((NUM_ADAPTERS, len(ADAPTED), MAX_PAGES), -1, np.int32)
        for row in range(len(ADAPTED)):
            order = generator.permutation(NUM_PAGES)
            pages[1, row, 0], pages[2, row] = order[0], order[1:3]
        self.pages = paddle.to_tensor(pages)
        self.ids = paddle.to_tensor(generator.integers(-1, NUM_ADAPTERS, num_rows).astype(np.int32))

    def tensor(self, *shape: int) -> Any:
        values = 0.2 * self.generator.standard_normal(shape)
        return paddle.to_tensor(values.astype(np.float32)).astype(self.dtype)

    def plain(self) -> Linear:
        low_rank = LowRankPages(self.a, self.b, self.sizes)
        return Linear(
            "dense", (self.weight,), self.bias, self.width, self.num_out, low_rank=low_rank
        )

    def compiled(self) -> Linear:
        def turned(tensor: Any, group: int) -> Any:
            values = packed(tensor.astype("float32").numpy(), group)
            return paddle.to_tensor(values).astype(self.dtype)

        low_rank = LowRankPages(turned(self.a, PACKED_IN), turned(self.b, PACKED_OUT), self.sizes)
        tensors = (ops.pack_dense(self.weight, self.dtype),)
        return replace(self.plain(), tensors=tensors, low_rank=low_rank)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [(136,), (96, 32, 32), (33, 7)])
@pytest.mark.parametrize(("width", "num_rows"), [(72, 1), (131, 9), (16, 600)])
def test_rows_get_what_their_adapters_add(
    dtype: str, sizes: tuple[int, ...], width: int, num_rows: int
) -> None:
    case = Case(dtype, width, sizes, num_rows)
    compiled, plain = case.compiled(), case.plain()
    without = ops.linear(case.x, compiled).astype("float32").numpy()
    alone = case.ids.numpy() < 0
    for row in range(len(ADAPTED)):
        given = case.ids, case.pages, row
        got = ops.adapted_linear(case.x, compiled, *given).astype("float32").numpy()
        wanted = reference.adapted_linear(case.x, plain, *given).astype("float32").numpy()
        assert_close(got, wanted, dtype, 2)
        np.testing.assert_array_equal(got[alone], without[alone])
        for number in range(0, num_rows, 97):  # by itself
            one = ops.adapted_linear(
                case.x[number : number + 1], compiled, case.ids[number : number + 1], *given[1:]
            )
            np.testing.assert_array_equal(one.astype("float32").numpy()[0], got[number])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_overflow_reaches_the_rows_of_its_own_adapter_alone(dtype: str) -> None:
    case = Case(dtype, 72, (24, 8), 9)
    ids = paddle.to_tensor(np.array([-1, 0, 1, 2, 1, 2, -1, 2, 1], np.int32))
    has_it = ids.numpy() == 2
    before = case.plain()
    wanted = reference.adapted_linear(case.x, before, ids, case.pages, 0).astype("float32")
    page = int(case.pages[2, 0, 1])  # adapter 1 has another one
    case.a[page] = paddle.full_like(case.a[page], 3e38)
    for run, weights in ((reference, case.plain()), (ops, case.compiled())):
        made = run.adapted_linear(case.x, weights, ids, case.pages, 0).astype("float32").numpy()
        assert not np.isfinite(made[has_it]).all()
        assert_close(made[~has_it], wanted.numpy()[~has_it], dtype, 2)


def test_adapters_that_are_not_there_are_refused() -> None:
    case = Case("float32", 16, (24, 8), 3)
    weights = case.compiled()
    assert weights.low_rank is not None

    def run(weights: Linear = weights, row: int = 0, **changes: Any) -> None:
        given = {"ids": case.ids, "pages": case.pages, **changes}
        ops.adapted_linear(case.x, weights, given["ids"], given["pages"], row)

    run()
    with pytest.raises(ValueError, match=r"adapter_ids holds 3 \(allowed: below 3\)"):
        run(ids=case.ids * 0 + 3)
    with pytest.raises(ValueError, match=r"adapter_pages holds 6 \(allowed: below 6\)"):
        run(pages=case.pages * 0 + 6)
    with pytest.raises(ValueError, match="adapter_ids has shape"):
        run(ids=case.ids[:2])
    with pytest.raises(ValueError, match=r"which is 4 \(allowed: 0 to 3\)"):
        run(row=4)
    for sizes, said in (((), "has 0 sizes"), ((8,) * 4, "has 4 sizes"), ((32, 0), "each above 0")):
        with pytest.raises(ValueError, match=f"part_sizes .*{said}"):
            run(replace(weights, low_rank=replace(weights.low_rank, part_sizes=sizes)))
    with pytest.raises(ValueError, match="adapters has shape"):
        run(replace(weights, low_rank=replace(weights.low_rank, part_sizes=(32,))))


def test_ids_of_rows_are_taken() -> None:
    ids = paddle.to_tensor(np.array([-1, 7, 2**31 - 1, 0, -(2**31)], np.int32))
    rows = paddle.to_tensor(np.array([4, 0, 0, 2, 1], np.int32))
    wanted = reference.take_ids(ids, rows).numpy()
    np.testing.assert_array_equal(ops.take_ids(ids, rows).numpy(), wanted)
    with pytest.raises(ValueError, match=r"rows holds 5 \(allowed: 0 to 4\)"):
        ops.take_ids(ids, rows + 1)
