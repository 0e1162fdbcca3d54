"""Rotary embedding, cache write, paged attention and the attention block, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from predict.device.library import Library
from predict.nn.inputs import max_lens_of
from tests.support.attention import Batch, Problem, Shape, attention, rope_table, rotated
from tests.support.cpu_kernels import (
    DTYPES,
    PAIRED,
    Array,
    Wide,
    force,
    int32,
    normal,
    normed,
    numpy32,
    refusal,
    rounded,
    tensor,
    threads,
)
from tests.support.tolerances import assert_close

OPERATOR = "paged_attention"  # whose candidates the fixture `candidate` goes through


# Groups of 1, 2, 3, 7, 8 query heads; head_dim that fills vectors, that does not, that is odd;
# contexts of 1, block - 1, block, block + 1, around the chunk of 64 and the split of 512.
SHAPES = (
    Shape(14, 2, 64, 64, ((1, 1), (1, 63), (1, 64), (1, 65), (1, 300))),
    Shape(8, 1, 128, 16, ((5, 15), (0, 40), (17, 17), (1, 16), (3, 130))),
    Shape(3, 3, 32, 32, ((33, 33), (1, 513), (4, 512), (2, 1030))),
    Shape(6, 3, 80, 128, ((129, 129), (1, 127), (0, 0))),
    Shape(6, 2, 96, 24, ((30, 600), (1, 25)), window=100),
    Shape(4, 2, 40, 8, ((9, 9), (1, 8), (70, 70)), window=5),
    Shape(2, 1, 256, 64, ((3, 200), (1, 1))),
    Shape(4, 2, 7, 16, ((3, 20), (1, 70))),
    Shape(2, 2, 64, 16, ((1, 700), (40, 640)), window=1),
    # Prefixes: all of a span, more than it, most of it, one token, none, of a decode step's.
    Shape(
        3,
        3,
        32,
        16,
        ((90, 90), (5, 5), (700, 700), (2, 2), (70, 70), (1, 80)),
        -1,
        (90, 3, 600, 1, 0, 60),
    ),
    Shape(8, 2, 64, 64, ((1, 1), (140, 140), (9, 640)), -1, (1, 139, 631)),
    # Sinks: far below all scores, among them, as high as their sum, far above.
    Shape(
        *(8, 2, 64, 16),
        ((1, 1), (1, 700), (3, 1100), (40, 40), (70, 130)),
        sinks=(-1e4, 0.0, 6.5, 1e4, -3.0, 2.0, 20.0, 90.0),
    ),
    Shape(3, 1, 40, 8, ((9, 9), (1, 600), (70, 70)), window=50, sinks=(-200.0, 1.5, 4.0)),
    Shape(2, 2, 7, 16, ((20, 20), (1, 80)), -1, (19, 60), sinks=(1.0, 3.0)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged_attention_sees_each_token_s_own_past(
    compiled: Library, candidate: str, shape: Shape, dtype: str
) -> None:
    if candidate in PAIRED and dtype == "bfloat16" and shape.head_dim % 2:
        pytest.skip("refused")
    problem = Problem.of(shape, dtype)
    expected = attention(shape, problem.q, problem.keys, problem.values, problem.scale)
    assert_close(problem.run(compiled), expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sink_as_high_as_the_only_score_halves_the_value(
    compiled: Library, candidate: str, dtype: str
) -> None:
    shape = Shape(4, 2, 64, 16, ((1, 1),))
    problem = Problem.of(shape, dtype)
    keys = np.repeat(problem.keys[0][0], 2, axis=0)  # of each query head
    scores = np.sum(problem.q[0].astype(np.float64) * keys, axis=1) * problem.scale
    batch = replace(problem.batch, shape=replace(shape, sinks=tuple(scores)))
    got = replace(problem, batch=batch).run(compiled)
    assert_close(got, np.repeat(problem.values[0][0], 2, axis=0).reshape(1, -1) / 2, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_far_below_change_no_bit_and_far_above_leave_nothing(
    compiled: Library, candidate: str, dtype: str
) -> None:
    shape = Shape(4, 2, 64, 16, ((1, 1), (1, 1200), (20, 20), (5, 90)))
    problem = Problem.of(shape, dtype)

    def run(sink: float) -> Array:
        batch = replace(problem.batch, shape=replace(shape, sinks=(sink,) * 4))
        return replace(problem, batch=batch).run(compiled)

    without = problem.run(compiled)
    for far in (1e3, 1e30, 3e38, np.inf):
        np.testing.assert_array_equal(run(-far), without)
        np.testing.assert_array_equal(run(far), 0)


def test_odd_head_dim_falls_to_a_candidate_without_pairs(compiled: Library) -> None:
    if refusal(compiled, "paged_attention", "avx512_bf16"):
        pytest.skip("no candidate with pairs")
    problem = Problem.of(Shape(2, 1, 7, 16, ((2, 5),)), "bfloat16")
    problem.run(compiled)
    force(compiled, "avx512_bf16")
    try:
        with pytest.raises(ValueError, match=r"avx512_bf16 \(head_dim is odd\)"):
            problem.run(compiled)
    finally:
        force(compiled, "")


# Tiles of 18 tokens, chunks of 64, splits of 512 are all cut somewhere.
CUTS = ((0, 1, 2, 64, 65, 300, 700), (0, 511, 513, 700), (0, 64, 128, 512, 700))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "window"), [(7, -1), (7, 90), (2, -1)])
def test_chunked_prefill_equals_whole_prefill_bit_for_bit(
    compiled: Library, candidate: str, dtype: str, heads: int, window: int
) -> None:
    if candidate == "scalar":
        pytest.skip("the same code as the others, and slow")
    problem = Problem.of(Shape(heads, 1, 64, 64, ((700, 700),), window), dtype)
    whole = problem.run(compiled)
    for cuts in CUTS:
        parts = [problem.part(0, a, b).run(compiled) for a, b in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_rows_of_denormals_have_the_same_bits_alone_and_together(
    compiled: Library, candidate: str
) -> None:
    """Some CPUs multiply a few rows of bfloat16 by other instructions than many."""
    problem = Problem.of(Shape(2, 1, 64, 64, ((40, 75),)), "bfloat16")
    values = [rounded(each * np.float32(2.0**-122), "bfloat16") for each in problem.values]
    problem = replace(problem, values=values)
    whole = problem.run(compiled)
    assert whole.any()
    parts = [problem.part(0, i, i + 1).run(compiled) for i in range(40)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_request_s_result_does_not_depend_on_its_batch(
    compiled: Library, candidate: str, dtype: str
) -> None:
    shape = Shape(8, 2, 64, 32, ((1, 40), (3, 3), (1, 1100), (25, 90), (1, 513)))
    problem = Problem.of(shape, dtype)
    together = problem.run(compiled)
    alone = [problem.part(i, 0, n).run(compiled) for i, (n, _) in enumerate(shape.spans)]
    np.testing.assert_array_equal(np.concatenate(alone), together)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(7, 1, 64, 64, ((1, 3000),)),
        Shape(8, 2, 32, 16, ((1, 1500), (40, 700), (1, 5), (1, 600))),
        Shape(4, 4, 80, 32, ((90, 1100),), window=600),
        Shape(4, 2, 64, 16, ((1, 2500), (40, 700), (1, 5)), sinks=(-1.0, 3.0, 7.0, 80.0)),
    ],
    ids=str,
)
def test_number_of_threads_does_not_change_a_bit(
    compiled: Library, shape: Shape, dtype: str
) -> None:
    problem = Problem.of(shape, dtype)
    with threads(compiled, 1):
        one = problem.run(compiled)
    for count in (2, 3, 8):
        with threads(compiled, count):
            np.testing.assert_array_equal(problem.run(compiled), one)


def test_window_as_long_as_the_context_equals_none(compiled: Library) -> None:
    problem = Problem.of(Shape(4, 2, 64, 16, ((5, 600), (1, 20))), "float32")
    wide = replace(problem, batch=Batch.of(replace(problem.batch.shape, window=600)))
    np.testing.assert_array_equal(wide.run(compiled), problem.run(compiled))


def test_blocks_that_left_the_window_are_not_looked_up(compiled: Library) -> None:
    problem = Problem.of(Shape(4, 2, 64, 16, ((2, 200),), window=20), "float32")
    kept = problem.run(compiled)
    caches = problem.batch.filled_cache(problem.keys), problem.batch.filled_cache(problem.values)
    problem.batch.block_tables[0, : (198 - 19) // 16] = -1
    out = compiled.op("regatta_paged_attention")(
        tensor(problem.q.reshape(2, -1), "float32"),
        [tensor(cache, "float32") for cache in caches],
        *problem.batch.index_tensors(),
        *(None, None, None, None),
        4,
        problem.scale,
        20,
        0.0,
        "dense",
    )[0]
    np.testing.assert_array_equal(out.numpy(), kept)


def test_padding_rows_are_zero(compiled: Library) -> None:
    problem = Problem.of(Shape(4, 2, 64, 16, ((2, 20), (1, 3))), "float32")
    caches = problem.batch.filled_cache(problem.keys), problem.batch.filled_cache(problem.values)
    padded = np.concatenate([problem.q.reshape(3, -1), np.full((2, 256), np.nan, "f4")])
    out = compiled.op("regatta_paged_attention")(
        tensor(padded, "float32"),
        [tensor(cache, "float32") for cache in caches],
        *problem.batch.index_tensors(),
        *(None, None, None, None),
        4,
        problem.scale,
        -1,
        0.0,
        "dense",
    )[0].numpy()
    np.testing.assert_array_equal(out[:3], problem.run(compiled))
    np.testing.assert_array_equal(out[3:], 0)


# heads, kv heads, head_dim, rotary dims
ROPES = ((14, 2, 64, 64), (3, 1, 80, 32), (2, 2, 40, 40), (4, 2, 96, 26), (1, 1, 128, 0))
# The same, and whether as many dims again rotate by second positions.
TURNS = (*((sizes, False) for sizes in ROPES), ((4, 4, 128, 64), True), ((3, 1, 40, 14), True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "twice", "norm"),
    [
        *((*turn, norm) for turn in TURNS for norm in ("none", "first")),
        *((sizes, False, "last") for sizes in ROPES),
    ],
)
def test_rope_rotates_heads_and_writes_their_slots_only(
    compiled: Library,
    candidate: str,
    sizes: tuple[int, int, int, int],
    twice: bool,
    norm: str,
    dtype: str,
) -> None:
    heads, kv_heads, dim, rotary = sizes
    rng = np.random.default_rng(3)
    positions = np.array([0, 5, 6, 49, 7], np.int32)
    second = np.array([0, 0, 1, 2, 49], np.int32)
    slots = np.array([3, 16, -1, 39, 0], np.int32)
    qkv = rounded(normal(rng, 5, heads + 2 * kv_heads, dim), dtype)
    norms = [rounded(1 + normal(rng, dim) / 4, dtype) for _ in range(2)]
    table = rope_table(50, rotary)
    keys, values = (tensor(np.full((5, kv_heads, 8, dim), np.nan, "f4"), dtype) for _ in range(2))
    outputs = compiled.op("regatta_rope_and_cache_write")(
        tensor(qkv.reshape(5, -1), dtype),
        int32(positions),
        int32(slots),
        tensor(table, "float32"),
        None,
        *(None if norm == "none" else tensor(factor, dtype) for factor in norms),
        [keys, values],
        int32(second) if twice else None,
        *(heads, kv_heads, dim, 1e-6, False, False, norm == "last", False),
        "dense",
    )
    wide = qkv.astype(np.float64)
    q, k, v = np.split(wide, [heads, heads + kv_heads], axis=1)
    if norm == "first":
        q, k = normed(q, norms[0], 1e-6), normed(k, norms[1], 1e-6)

    def turned(x: Wide) -> Wide:
        if not twice:
            return rotated(x, table[positions])
        parts = x[..., :rotary], x[..., rotary:]
        pairs = zip(parts, (positions, second), strict=True)
        return np.concatenate([rotated(part, table[rows]) for part, rows in pairs], axis=-1)

    q, k = turned(q), turned(k)
    if norm == "last":
        q, k = normed(q, norms[0], 1e-6), normed(k, norms[1], 1e-6)
    assert_close(numpy32(outputs[0]), q.reshape(5, -1), dtype)
    for cache, returned, new in ((keys, outputs[1], k), (values, outputs[2], v)):
        np.testing.assert_array_equal(numpy32(returned), numpy32(cache))  # in place
        rows = numpy32(cache).transpose(0, 2, 1, 3).reshape(40, kv_heads, dim)
        written = slots >= 0
        assert_close(rows[slots[written]], new[written], dtype)
        untouched = np.setdiff1d(np.arange(40), slots[written])
        assert np.isnan(rows[untouched]).all()


Change = Callable[[dict[str, Any]], None]


def _set(name: str, value: Any) -> Change:
    return lambda arguments: arguments.__setitem__(name, value)


BAD_ATTENTION: dict[str, tuple[Change, str]] = {
    "q dtype": (
        lambda a: a.__setitem__("q", a["q"].astype("bfloat16")),
        "key_cache is float32, expected bfloat16",
    ),
    "q shape": (_set("num_heads", 6), r"q has shape \[3, 256\], expected \[-1, 384\]"),
    "group": (_set("num_heads", 3), r"num_heads 3, num_kv_heads 2, head_dim 64 do not go together"),
    "scale": (_set("scale", 0.0), "softmax_scale is 0.0.*more than 0"),
    "window": (_set("window", 0), r"window is 0 \(allowed: -1 for none, or 1 and more\)"),
    "borders": (
        _set("borders", [0, 2, 4]),
        r"cu_seqlens_q\[2\] is 4 \(allowed: 2 .. the number of tokens, 3\)",
    ),
    "borders dtype": (
        lambda a: a.__setitem__("borders", np.array([0, 2, 3], np.int64)),
        "cu_seqlens_q is int64, expected int32",
    ),
    "context too short": (
        _set("lengths", [1, 3]),
        r"context_lens\[0\] is 1 \(allowed: the span's 2 tokens .. the block table's 48\)",
    ),
    "prefix too long": (
        _set("prefix_lens", [20, 4]),
        r"prefix_lens\[1\] is 4 \(allowed: 0 to the context's 3\)",
    ),
    "prefix below 0": (_set("prefix_lens", [-1, 0]), r"prefix_lens\[0\] is -1"),
    "prefix of the wrong shape": (_set("prefix_lens", [0]), r"prefix_lens has shape \[1\]"),
    "sinks of the wrong shape": (
        lambda a: a.__setitem__("sinks", tensor(np.zeros(2, "f4"), "float32")),
        r"sinks has shape \[2\], expected \[4\]",
    ),
    "sinks dtype": (
        lambda a: a.__setitem__("sinks", tensor(np.zeros(4, "f4"), "bfloat16")),
        "sinks is bfloat16, expected float32",
    ),
    "prefix and slopes": (
        lambda a: a.update(prefix_lens=[0, 0], slopes=tensor(np.ones(4, "f4"), "float32")),
        "prefix_lens goes with no tree_mask and no slopes",
    ),
    "context too long": (_set("lengths", [20, 49]), r"context_lens\[1\] is 49"),
    "block id": (
        _set("tables", [[0, 1, -1], [99, 0, 0]]),
        r"block_tables\[1\]\[0\] is 99 \(allowed: 0 .. 5\)",
    ),
    "no block": (_set("tables", [[0, -1, -1], [1, 0, 0]]), r"block_tables\[0\]\[1\] is -1"),
}


@pytest.mark.parametrize("case", BAD_ATTENTION)
def test_paged_attention_says_what_does_not_fit(compiled: Library, case: str) -> None:
    import paddle

    problem = Problem.of(Shape(4, 2, 64, 16, ((2, 20), (1, 3))), "float32")
    arguments: dict[str, Any] = {
        "q": tensor(problem.q.reshape(3, -1), "float32"),
        "caches": [
            tensor(problem.batch.filled_cache(contexts), "float32")
            for contexts in (problem.keys, problem.values)
        ],
        "borders": [0, 2, 3],
        "lengths": [20, 3],
        "tables": problem.batch.block_tables,
        "longest": max_lens_of([2, 1], [20, 3]),
        "tree_mask": None,
        "slopes": None,
        "prefix_lens": None,
        "sinks": None,
        "num_heads": 4,
        "scale": 0.125,
        "window": -1,
        "softcap": 0.0,
        "kv_format": "dense",
    }
    change, message = BAD_ATTENTION[case]
    change(arguments)
    for name in ("borders", "lengths", "tables", "longest", "prefix_lens"):
        if arguments[name] is None:
            continue
        if not isinstance(arguments[name], np.ndarray):
            arguments[name] = np.array(arguments[name], np.int32)
        arguments[name] = paddle.to_tensor(arguments[name])
    with pytest.raises(ValueError, match=message):
        compiled.op("regatta_paged_attention")(*arguments.values())


@pytest.mark.parametrize(
    ("positions", "slots", "columns", "message"),
    [
        ([0, 50], [0, 1], 32, r"positions\[1\] is 50 \(allowed: 0 .. 49\)"),
        ([0, 1], [0, 40], 32, r"slot_mapping\[1\] is 40 \(allowed: -1 .. 39\)"),
        ([0, 1], [-2, 0], 32, r"slot_mapping\[0\] is -2"),
        ([0, 1], [0, 1], 34, r"rope_cache has shape \[50, 34\].*at most head_dim, 32"),
        ([0], [0, 1], 32, r"positions has shape \[1\], expected \[2\]"),
    ],
)
def test_rope_says_what_does_not_fit(
    compiled: Library, positions: list[int], slots: list[int], columns: int, message: str
) -> None:
    cache = np.zeros((5, 1, 8, 32), "f4")
    with pytest.raises(ValueError, match=message):
        compiled.op("regatta_rope_and_cache_write")(
            tensor(np.zeros((2, 96)), "float32"),
            int32(positions),
            int32(slots),
            tensor(rope_table(50, columns), "float32"),
            *(None, None, None),
            [tensor(cache, "float32"), tensor(cache, "float32")],
            None,
            *(1, 1, 32, 1e-6, False, False, False, False),
            "dense",
        )


@pytest.mark.parametrize(
    ("rows", "columns", "interleaved", "message"),
    [
        ([0, 50], 16, False, r"block_positions\[1\] is 50 \(allowed: 0 .. 49\)"),
        ([0], 16, False, r"block_positions has shape \[1\], expected \[2\]"),
        ([0, 1], 18, False, r"block_positions with rope_cache of shape \[50, 18\].*head_dim, 32"),
        ([0, 1], 16, True, "block_positions with rope_cache .*interleaved"),
    ],
)
def test_rope_says_what_does_not_fit_second_positions(
    compiled: Library, rows: list[int], columns: int, interleaved: bool, message: str
) -> None:
    cache = np.zeros((5, 1, 8, 32), "f4")
    with pytest.raises(ValueError, match=message):
        compiled.op("regatta_rope_and_cache_write")(
            tensor(np.zeros((2, 96)), "float32"),
            int32([0, 1]),
            int32([0, 1]),
            tensor(rope_table(50, columns), "float32"),
            *(None, None, None),
            [tensor(cache, "float32"), tensor(cache, "float32")],
            int32(rows),
            *(1, 1, 32, 1e-6, False, False, False, interleaved),
            "dense",
        )
