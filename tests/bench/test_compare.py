"""What is called faster or slower, and what is no comparison."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predict.bench import compare
from predict.bench.spread import (
    least_repetitions,
    least_turns,
    ratio_between,
    ratio_of_turns,
)
from predict.errors import UserError

Samples = Mapping[str, Sequence[float]]
SLOW = [10.0, 10.1, 10.2, 9.9, 9.8]
FAST = [5.0, 5.1, 5.2, 4.9, 4.8]


def file(path: Path, samples: Mapping[str, Samples], **values: Any) -> str:
    """A file of numbers; samples: case -> metric -> repetitions."""
    rows = [
        {"name": name, "values": {}, "samples": {m: list(each) for m, each in metrics.items()}}
        for name, metrics in samples.items()
    ]
    content = {"device": {"name": "a CPU", "num_threads": 2}, "versions": {}, "settings": {}}
    suites = {"throughput": {"rows": rows}, "process": {"rows": [{"name": "x", "values": {}}]}}
    path.write_text(json.dumps({**content, "suites": suites, **values}))
    return str(path)


def changes(path: Path, before: Samples, after: Samples, **values: Any) -> list[compare.Change]:
    early, late = (
        compare.read_recorded(file(path / name, {"1x2x3": samples}))
        for name, samples in (("a.json", before), ("b.json", after))
    )
    return compare.compare(early, late, **{"confidence": 0.95, "min_change": 0.02, **values})


@pytest.mark.parametrize("sizes", [(3, 3), (4, 5), (5, 5)])
def test_the_interval_covers_as_often_as_it_says_whatever_the_order(sizes: tuple[int, int]) -> None:
    """All orders of two sets of samples are equally likely when nothing changed."""
    num_before, num_after = sizes
    missed = total = 0
    places = range(num_before + num_after)
    for early in itertools.combinations(places, num_before):
        late = [place for place in places if place not in early]
        found = ratio_between([2.0**p for p in early], [2.0**p for p in late], 0.8)
        assert found.low is not None
        assert found.high is not None
        missed += not found.low <= 1.0 <= found.high
        total += 1
    assert total == math.comb(num_before + num_after, num_before)
    assert missed / total <= 0.2
    assert missed > 0  # an interval of everything would never miss


def test_too_few_repetitions_have_no_interval() -> None:
    assert least_repetitions(0.95) == 4
    assert least_turns(0.95) == 6
    assert ratio_between([1.0, 1.1, 1.2], [5.0, 5.1, 5.2], 0.95).low is None
    assert ratio_between([1.0] * 4, [5.0] * 4, 0.95).low == 5.0
    assert ratio_of_turns([1.0] * 5, [5.0] * 5, 0.95).high is None
    assert ratio_of_turns([1.0] * 6, [5.0] * 6, 0.95).high == 5.0


def test_turns_are_held_against_their_own_neighbour() -> None:
    machine = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]  # it slows down all the time
    ours, peer = machine, [1.1 * value for value in machine]
    apart, turns = ratio_between(ours, peer, 0.95), ratio_of_turns(ours, peer, 0.95)
    assert not apart.is_beyond(0.0)
    assert turns.is_beyond(0.05)
    assert turns.low == pytest.approx(1.1)


@given(
    st.lists(st.floats(0.1, 10.0), min_size=4, max_size=9),
    st.lists(st.floats(0.1, 10.0), min_size=4, max_size=9),
)
def test_the_other_way_round_the_ratio_is_the_inverse(
    before: list[float], after: list[float]
) -> None:
    one, other = ratio_between(before, after, 0.95), ratio_between(after, before, 0.95)
    assert one.low is not None
    assert other.high is not None
    assert one.low == pytest.approx(1.0 / other.high)
    assert one.low <= one.value <= (one.high or 0.0)
    assert one.is_beyond(0.02) == other.is_beyond(0.02)


@pytest.mark.parametrize(
    ("metric", "verdict"),
    [("tpot_ms", "faster"), ("output_tokens_per_s", "slower"), ("tpot_times_as_good", "slower")],
)
def test_times_are_better_when_less_and_rates_when_more(
    metric: str, verdict: str, tmp_path: Path
) -> None:
    (change,) = changes(tmp_path, {metric: SLOW}, {metric: FAST})
    assert change.verdict == verdict
    assert change.times_as_fast.value == pytest.approx(2.0 if verdict == "faster" else 0.5, rel=0.1)
    assert (change.before, change.after) == (10.0, 5.0)


def test_within_the_spread_is_the_same(tmp_path: Path) -> None:
    wide = [5.0, 7.0, 9.0, 11.0, 14.0]
    (change,) = changes(tmp_path, {"tpot_ms": SLOW}, {"tpot_ms": wide})
    assert change.verdict == "same"


def test_a_sure_but_small_change_is_the_same(tmp_path: Path) -> None:
    before, after = [100.0 + i / 1000 for i in range(5)], [101.0 + i / 1000 for i in range(5)]
    (change,) = changes(tmp_path, {"tpot_ms": before}, {"tpot_ms": after})
    assert change.verdict == "same"
    (change,) = changes(tmp_path, {"tpot_ms": before}, {"tpot_ms": after}, min_change=0.0)
    assert change.verdict == "slower"


def test_too_few_repetitions_are_no_verdict(tmp_path: Path) -> None:
    found = changes(tmp_path, {"tpot_ms": SLOW[:3]}, {"tpot_ms": FAST[:3]})
    assert found[0].verdict == "too few"
    assert "95% takes 4 on either side, where throughput: 1x2x3 has 3 and 3" in compare.summary(
        found, 0.95
    )


def test_what_is_no_speed_is_not_compared(tmp_path: Path) -> None:
    before: Samples = {"tpot_ms": SLOW, "bandwidth_gbs": SLOW, "good_share": [0.0] * 5}
    assert [change.metric for change in changes(tmp_path, before, before)] == ["tpot_ms"]


def test_cases_of_one_file_alone_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = {"tpot_ms": SLOW}
    one = file(tmp_path / "a.json", {"1x2x3": slow, "4x5x6": slow}, settings={"dtype": "float32"})
    other = file(tmp_path / "b.json", {"1x2x3": slow}, settings={"dtype": "bfloat16"})
    assert compare.main([one, other]) == 0
    said = capsys.readouterr()
    assert "a.json: throughput: 4x5x6" in said.err
    assert "dtype: float32 before, bfloat16 after" in said.err
    assert "1 same" in said.out
    only = file(tmp_path / "c.json", {"7x8x9": slow})
    assert compare.main([other, only]) == 2
    assert "no case in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    "device", [{"name": "another"}, {"name": "a CPU", "num_threads": 4}, {}], ids=str
)
def test_files_of_different_devices_are_refused_unless_told(
    device: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = file(tmp_path / "a.json", {"1x2x3": {"tpot_ms": SLOW}})
    other = file(tmp_path / "b.json", {"1x2x3": {"tpot_ms": FAST}}, device=device)
    assert compare.main([one, other]) == 2
    assert "--other_device" in capsys.readouterr().err
    assert compare.main([one, other, "--other_device"]) == 0
    assert "note: devices differ" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "after", "fail_on", "status"),
    [
        (SLOW, FAST, None, 0),
        (FAST, SLOW, None, 0),
        (SLOW, FAST, "slower", 0),
        (FAST, SLOW, "slower", 1),
        (SLOW, FAST, "different", 1),
        (SLOW, SLOW, "different", 0),
        (SLOW, SLOW[:2], "slower", 1),  # nothing was shown
    ],
)
def test_the_exit_status_is_for_ci(
    before: list[float], after: list[float], fail_on: str | None, status: int, tmp_path: Path
) -> None:
    paths = [
        file(tmp_path / name, {"1x2x3": {"tpot_ms": samples}})
        for name, samples in (("a.json", before), ("b.json", after))
    ]
    words = [] if fail_on is None else ["--fail_on", fail_on]
    written = tmp_path / "changes.json"
    assert compare.main([*paths, *words, "--output_file", str(written)]) == status
    (change,) = json.loads(written.read_text())["changes"]
    assert change["case"] == "throughput: 1x2x3"
    assert change["num_before"] == len(before)


def broken(path: Path, rows: Any) -> str:
    path.write_text(json.dumps({"device": {}, "suites": {"throughput": {"rows": rows}}}))
    return str(path)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"samples": {}}], "KeyError: 'name'"),
        ([{"name": "a", "samples": {"tpot_ms": 3}}], "1 to 100 samples"),
        ([{"name": "a", "samples": {"tpot_ms": ["3"]}}], "no numbers"),
        ([{"name": "a", "samples": {"tpot_ms": [1.0] * 101}}], "1 to 100 samples"),
        ([{"name": "a"}, {"name": "a"}], "twice"),
        (7, "TypeError"),
    ],
)
def test_a_file_of_another_form_is_refused(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        compare.read_recorded(broken(tmp_path / "a.json", rows))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.json"], "1 files where two"),
        (["a.json", "b.json", "c.json"], "3 files where two"),
        (["a.json", "b.json", "--confidence", "1"], "allowed: 0.5 to 0.9999"),
        (["a.json", "b.json", "--min_change", "-1"], "allowed: 0 to 10"),
        (["a.json", "b.json", "--fail_on", "faster"], "allowed: slower, different"),
    ],
)
def test_what_is_no_comparison_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare.parse(words)
