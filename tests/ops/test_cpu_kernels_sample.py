"""The sampling operator: greedy, top_k, nucleus, and the generator behind its draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from predict.device.library import Library
from predict.ops.plain_sampling import _sample_row, uniform
from tests.support.cpu_kernels import Array, Ints, normal, sample, threads

OPERATOR = "sample"  # whose candidates the fixture `candidate` goes through


def test_draws_follow_the_generator(compiled: Library, candidate: str) -> None:
    """With equal logits the token is u * vocabulary, rounded down."""
    seeds = np.array([0, 0, 1, 2**40 + 5, -1, -(2**63), 123456789], np.int64)
    offsets = np.array([0, 1, 0, 2**33 + 7, -1, 3, 987654321012], np.int64)
    got = sample(compiled, np.zeros((7, 4096)), seeds=seeds, offsets=offsets)
    wanted = [int(uniform(int(s), int(o)) * 4096) for s, o in zip(seeds, offsets, strict=True)]
    assert got.tolist() == wanted
    assert wanted[0] == 0x6627E8D5 >> 20


VOCABULARIES = (1, 2, 15, 16, 17, 64, 1000, 4099)


@pytest.mark.parametrize("size", VOCABULARIES)
def test_greedy_takes_the_lowest_index_of_the_largest(
    compiled: Library, candidate: str, size: int
) -> None:
    rng = np.random.default_rng(size)
    logits = np.round(normal(rng, 20, size))  # many ties
    logits[0] = -np.inf
    logits[1] = 7
    wanted = np.argmax(logits, axis=1)
    np.testing.assert_array_equal(sample(compiled, logits, temperature=0.0), wanted)
    np.testing.assert_array_equal(sample(compiled, logits[1:], top_k=1), wanted[1:])
    np.testing.assert_array_equal(sample(compiled, logits[1:], top_p=0.0), wanted[1:])
    np.testing.assert_array_equal(sample(compiled, logits[1:], temperature=1e-38), first_of(logits))


def first_of(logits: Array) -> Ints:
    """Tokens drawn at a vanishing temperature: one of the largest, by u."""
    out = []
    for row in logits[1:]:
        largest = np.flatnonzero(row == row.max())
        out.append(largest[int(uniform(0, 0) * len(largest))])
    return np.array(out)


def draw(
    logits: Array, temperature: float, top_k: int, top_p: float, u: float
) -> tuple[int, float]:
    """The token, and how near (relative weight) another one would have been."""
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    weights = np.exp(scaled[order] - scaled[order[0]])
    sums = np.cumsum(weights)
    wanted = top_p * sums[-1]
    last = int(np.argmax(sums >= wanted)) if top_p < 1 else len(sums) - 1
    margin = np.min(np.abs(sums - wanted)) if top_p < 1 else np.inf
    target = u * sums[last]
    index = int(np.argmax(sums > target))
    margin = min(margin, np.min(np.abs(sums[: last + 1] - target)))
    return int(order[index]), float(margin / sums[-1])


SETTINGS = (
    # temperature, top_k, top_p
    (1.0, 0, 1.0),
    (0.7, 0, 0.9),
    (1.3, 0, 0.5),
    (3.0, 0, 0.999),
    (1.0, 2, 1.0),
    (0.5, 40, 0.8),
    (2.0, 700, 0.95),
    (1.0, 10**9, 0.3),
    (100.0, 0, 0.99),
    (1.0, 5, 0.0),
)


def row_kinds(rng: np.random.Generator, size: int) -> Array:
    """Peaked, flat, tied, two-valued, with -inf, and far from 0."""
    rows = normal(rng, 7, size)
    rows[0] *= 8
    rows[1] /= 100
    rows[2] = np.round(rows[2])
    rows[3] = rows[3] > 1
    rows[4, rng.random(size) < 0.9] = -np.inf
    rows[4, size // 2] = 0
    rows[5] += 1e4
    rows[6] = np.linspace(-90, 0, size)
    return rows


@pytest.mark.parametrize("size", [1, 3, 17, 256, 9001])
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_equal_a_sort_of_the_whole_vocabulary(
    compiled: Library, candidate: str, size: int, setting: tuple[float, int, float]
) -> None:
    rng = np.random.default_rng(11)
    rows = np.concatenate([row_kinds(rng, size) for _ in range(2)])
    temperature, top_k, top_p = setting
    top_p = float(np.float32(top_p))
    temperature = float(np.float32(temperature))
    offsets = np.arange(len(rows))
    got = sample(compiled, rows, temperature, top_k, top_p, seeds=5, offsets=offsets)
    num_compared = 0
    for row, offset, token in zip(rows, offsets, got, strict=True):
        wanted, margin = draw(row, temperature, top_k, top_p, uniform(5, int(offset)))
        # Weights are float32: a target on the border of two tokens may fall on either side.
        if margin > 1e-6:
            assert token == wanted
            num_compared += 1
        assert np.isfinite(row[token])
    assert num_compared > len(rows) // 2 or (size > 1 and (temperature >= 3 or size > 9000))


NARROWED = (
    # temperature, top_k, top_p, min_p, typical_p
    (1.0, 0, 1.0, 0.02, 1.0),
    (2.0, 0, 0.95, 0.05, 1.0),
    (1.0, 50, 0.9, 0.1, 1.0),
    (1.0, 0, 1.0, 0.0, 0.5),
    (0.7, 0, 1.0, 0.0, 0.95),
    (1.5, 0, 0.9, 0.0, 0.2),
    (3.0, 300, 1.0, 0.0, 0.7),
    (1.0, 0, 0.95, 0.01, 0.9),
)


@pytest.mark.parametrize("size", [1, 3, 17, 256, 9001, 40_000])
@pytest.mark.parametrize("setting", NARROWED, ids=str)
def test_narrowed_draws_equal_the_reference(
    compiled: Library, candidate: str, size: int, setting: tuple[float, int, float, float, float]
) -> None:
    rng = np.random.default_rng(21)
    rows = row_kinds(rng, size)
    # Ties on a border of top_k and top_p go with their equals where typical_p is on.
    rows = rows[[0, 1, 4, 5, 6]] if setting[4] < 1 else rows
    rows = np.repeat(rows, 8, axis=0)
    temperature, top_k, top_p, min_p, typical_p = (float(np.float32(value)) for value in setting)
    offsets = np.arange(len(rows))
    got = sample(
        compiled,
        rows,
        temperature,
        int(top_k),
        top_p,
        seeds=6,
        offsets=offsets,
        min_p=min_p,
        typical_p=typical_p,
    )
    others = 0
    for row, offset, token in zip(rows, offsets, got, strict=True):
        u = uniform(6, int(offset))
        wanted = _sample_row(row, temperature, int(top_k), top_p, u, min_p, typical_p)
        assert np.isfinite(row[token])
        # A border decided by rounding moves the draw by a token or two.
        others += abs(int(np.sum(row > row[token])) - int(np.sum(row > row[wanted]))) > 2
    assert others == 0


def test_large_vocabulary_of_equal_and_of_flat_logits(compiled: Library) -> None:
    rng = np.random.default_rng(12)
    size = 152_064
    rows = np.stack([np.zeros(size, "f4"), normal(rng, size) / 1e3, normal(rng, size) * 3])
    got = sample(compiled, rows, 1.0, 0, [1.0, 1.0, 0.8], seeds=9, offsets=[0, 1, 2])
    assert got[0] == int(uniform(9, 0) * size)
    for i, top_p in ((1, 1.0), (2, float(np.float32(0.8)))):
        scaled = np.sort(rows[i].astype(np.float64))[::-1]
        sums = np.cumsum(np.exp(scaled - scaled[0]))
        kept = sums[-1] if top_p == 1 else sums[np.argmax(sums >= top_p * sums[-1])]
        wanted = np.argmax(sums > uniform(9, i) * kept)
        place = np.searchsorted(-scaled, -rows[i, got[i]])
        assert abs(int(place) - int(wanted)) <= 2  # neighbours differ by less than float32 sees


def test_top_k_keeps_the_lower_index_among_equals(compiled: Library, candidate: str) -> None:
    logits = np.tile(np.array([0, 1, 1, 1, 0, 1], "f4"), (300, 1))
    got = sample(compiled, logits, top_k=3, offsets=np.arange(300))
    assert sorted(set(got.tolist())) == [1, 2, 3]
    got = sample(compiled, logits, top_k=5, offsets=np.arange(300))
    assert sorted(set(got.tolist())) == [0, 1, 2, 3, 5]


def test_nucleus_is_the_smallest_prefix_that_reaches_top_p(
    compiled: Library, candidate: str
) -> None:
    logits = np.tile(np.log(np.array([4, 1, 2, 1], "f4")), (400, 1))
    offsets = np.arange(400)
    for top_p, kept in ((0.49, [0]), (0.51, [0, 2]), (0.76, [0, 1, 2]), (0.9, [0, 1, 2, 3])):
        got = sample(compiled, logits, top_p=top_p, offsets=offsets)
        assert sorted(set(got.tolist())) == kept


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.8)])
def test_frequencies_follow_the_probabilities(
    compiled: Library, candidate: str, top_k: int, top_p: float
) -> None:
    logits = np.array([0.3, -1, 2, 0.5, 1.4, -3, 0], "f4")
    count = 20_000
    got = sample(
        compiled, np.tile(logits, (count, 1)), 0.8, top_k, top_p, seeds=1, offsets=np.arange(count)
    )
    order = np.argsort(-logits)
    probabilities = np.exp(logits[order] / 0.8)
    probabilities /= probabilities.sum()
    kept = top_k or len(logits)
    if top_p < 1:
        kept = int(np.argmax(np.cumsum(probabilities) >= top_p)) + 1
    expected = probabilities[:kept] / probabilities[:kept].sum() * count
    counts = np.bincount(got, minlength=len(logits))[order]
    assert counts[kept:].sum() == 0
    chi_square = np.sum((counts[:kept] - expected) ** 2 / expected)
    assert chi_square < 25  # 6 degrees of freedom or fewer: p < 0.0004


def test_draws_do_not_depend_on_batch_or_threads(compiled: Library, candidate: str) -> None:
    rng = np.random.default_rng(13)
    rows = normal(rng, 9, 50_000) * 2
    offsets = np.arange(9)
    settings: dict[str, npt.ArrayLike] = {"temperature": 0.9, "top_p": 0.95, "seeds": 3}
    with threads(compiled, 1):
        one = sample(compiled, rows, offsets=offsets, **settings)
    with threads(compiled, 3):
        np.testing.assert_array_equal(sample(compiled, rows, offsets=offsets, **settings), one)
    alone = [sample(compiled, rows[i : i + 1], offsets=i, **settings)[0] for i in range(9)]
    np.testing.assert_array_equal(alone, one)


def test_rows_may_mix_greedy_and_drawn(compiled: Library) -> None:
    rng = np.random.default_rng(14)
    rows = normal(rng, 4, 500)
    got = sample(compiled, rows, [0, 1, 0.5, 1], [0, 1, 0, 20], [1, 1, 0.9, 1], 2, range(4))
    assert got[:2].tolist() == np.argmax(rows[:2], axis=1).tolist()
    for i, (t, k, p) in ((2, (0.5, 0, 0.9)), (3, (1.0, 20, 1.0))):
        assert got[i] == draw(rows[i], t, k, float(np.float32(p)), uniform(2, i))[0]


def test_no_rows_give_no_tokens(compiled: Library) -> None:
    assert sample(compiled, np.zeros((0, 10))).shape == (0,)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": [0, -1, 0]}, r"temperature\[1\] is -1.0+ \(allowed: 0 and more, finite\)"),
        ({"temperature": [0, 0, np.nan]}, r"temperature\[2\] is -?nan"),
        ({"top_k": [-1, 0, 0]}, r"top_k\[0\] is -1 \(allowed: 0 for all, 1 and more\)"),
        ({"top_p": [0, 1, 1.5]}, r"top_p\[2\] is 1.5"),
    ],
)
def test_sample_says_which_parameter_is_out_of_range(
    compiled: Library, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        sample(compiled, np.zeros((3, 5)), **changes)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("column", [0, 15, 16, 36])
def test_rows_with_a_nan_yield_no_token_and_leave_the_others_theirs(
    compiled: Library, candidate: str, temperature: float, column: int
) -> None:
    logits = np.zeros((3, 37), "f4")
    logits[:, 5] = 50
    logits[1, column] = np.nan
    assert sample(compiled, logits, temperature).tolist() == [5, -1, 5]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("narrowed", [{}, {"top_k": 2}, {"top_p": 0.5}, {"typical_p": 0.5}])
def test_rows_without_a_finite_largest_logit_yield_no_token(
    compiled: Library, candidate: str, value: float, narrowed: dict[str, Any]
) -> None:
    logits = np.full((3, 5), -np.inf, "f4")
    logits[[0, 2], 4] = 0
    logits[1, 3] = value
    assert sample(compiled, logits, **narrowed).tolist() == [4, -1, 4]


@pytest.mark.parametrize("value", [np.inf, -np.inf])
def test_greedy_rows_take_an_infinite_largest_logit(compiled: Library, value: float) -> None:
    logits = np.full((2, 5), -np.inf, "f4")
    logits[:, 3] = value
    wanted = 3 if value > 0 else 0  # the lowest index of equals
    assert sample(compiled, logits, [0.0, 1.0], [0, 1]).tolist() == [wanted, wanted]


def test_logits_must_be_float32(compiled: Library) -> None:
    import paddle

    one = paddle.ones([1])
    with pytest.raises(ValueError, match="logits is bfloat16, expected float32"):
        compiled.op("regatta_sample")(
            paddle.ones([1, 4]).astype("bfloat16"), one, one, one, one, one, None, None
        )
