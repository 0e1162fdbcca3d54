"""What is called faster or slower, and what is no comparison: two files, and two sides in turns."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.bench import compare
from predict.bench.record import repeated_row, spread_of
from predict.bench.turns import TurnCommand, Turns, ratio_of_turns, take_turns
from predict.device import library
from predict.errors import UserError
from tests.support.paths import ROOT

Samples = Mapping[str, Sequence[float]]
SLOW = [10.0, 10.1, 10.2, 9.9, 9.8]
FAST = [5.0, 5.1, 5.2, 4.9, 4.8]


def file(path: Path, samples: Mapping[str, Samples], **values: Any) -> str:
    """A file of numbers; samples: case -> metric -> repetitions."""
    rows = [repeated_row(name, metrics) for name, metrics in samples.items()]
    content = {"device": {"name": "a CPU", "num_threads": 2}, "versions": {}, "settings": {}}
    process = [{"name": "x", "values": {"ready_s": 3.0}}]  # once
    suites = {"throughput": {"rows": rows}, "process": {"rows": process}}
    path.write_text(json.dumps({**content, "suites": suites, **values}))
    return str(path)


def changes(
    path: Path, before: Samples, after: Samples, min_change: float = 0.02
) -> list[compare.Change]:
    early, late = (
        compare.read_recorded(file(path / name, {"1x2x3": samples}))
        for name, samples in (("a.json", before), ("b.json", after))
    )
    return compare.compare_files(early, late, min_change)


def number(samples: Sequence[float]) -> compare.Number:
    spread = spread_of(samples)
    median = float(np.median(samples))
    return compare.Number(median, int(spread["n"]), spread["q1"], spread["q3"])


@pytest.mark.parametrize("count", [4, 5, 7, 20])
@pytest.mark.parametrize("noise", ["normal", "exponential"])
def test_the_interval_of_two_files_covers_as_often_as_it_says(noise: str, count: int) -> None:
    draw = getattr(np.random.default_rng(count), noise)
    missed = 0
    for _ in range(400):
        early, late = (100.0 + draw(size=count) for _ in range(2))
        ratio = compare.ratio_of_files(number(early), number(late))
        assert ratio.low is not None
        missed += not ratio.low <= 1.0 <= (ratio.high or 0.0)
    assert 0 < missed <= 0.07 * 400  # an interval of everything would never miss


def test_too_few_repetitions_have_no_interval() -> None:
    assert compare.ratio_of_files(number([1.0] * 3), number([5.0] * 9)).low is None
    assert compare.ratio_of_files(number([1.0] * 4), number([5.0] * 4)).low == 5.0
    assert ratio_of_turns([5.0] * 5).high is None
    assert ratio_of_turns([5.0] * 6).high == 5.0


def test_the_interval_of_turns_leaves_out_what_the_sign_test_allows() -> None:
    """Of 20 turns 5 at either end: twice the sum of C(20, 0) to C(20, 5) is 0.041 of 2^20."""
    ratio = ratio_of_turns([float(each) for each in range(20, 0, -1)])
    assert (ratio.low, ratio.value, ratio.high) == (6.0, 10.5, 15.0)


def test_turns_are_held_against_their_own_neighbour_and_begin_in_turn() -> None:
    machine = iter([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])  # it slows down all the time
    asked: list[str] = []
    now = [0.0]

    def side(name: str, factor: float) -> dict[str, dict[str, float]]:
        if len(asked) % 2 == 0:
            now[0] = next(machine)
        asked.append(name)
        return {"case": {"tpot_ms": factor * now[0], "output_tokens_per_s": 1.0 / now[0]}}

    turns = Turns(("before", "after"))
    take_turns(turns, lambda: side("b", 1.1), lambda: side("a", 1.0), 6, lambda: None)
    assert asked == ["b", "a", "a", "b"] * 3
    ratios = {metric: ratio_of_turns(each) for _, metric, each in turns.ratios()}
    assert ratios["tpot_ms"].low == pytest.approx(1.1)
    assert ratios["tpot_ms"].is_beyond(0.05)
    assert not ratios["output_tokens_per_s"].is_beyond(0.0)
    made = turns.suites("the command")
    assert made["before"]["rows"][0]["spread"]["tpot_ms"]["n"] == 6
    (row,) = made["ratios"]["rows"]
    assert row["values"]["tpot_ms_times_as_good"] == pytest.approx(1.1)


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


@pytest.mark.parametrize(
    ("before", "after", "min_change", "verdict"),
    [
        (SLOW, [5.0, 7.0, 9.0, 12.0, 14.0], 0.02, "same"),  # within the spread
        ([100.0 + i / 1000 for i in range(5)], [101.0 + i / 1000 for i in range(5)], 0.02, "same"),
        ([100.0 + i / 1000 for i in range(5)], [101.0 + i / 1000 for i in range(5)], 0.0, "slower"),
        (SLOW[:3], FAST[:3], 0.02, "too few"),
    ],
)
def test_the_verdict_follows_from_the_interval_and_the_least_change(
    before: list[float], after: list[float], min_change: float, verdict: str, tmp_path: Path
) -> None:
    found = changes(tmp_path, {"tpot_ms": before}, {"tpot_ms": after}, min_change)
    assert found[0].verdict == verdict
    few = "takes 4 on either side, or 6 turns, and throughput: 1x2x3 has 3 and 3"
    assert (few in compare.summary(found)) is (verdict == "too few")


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


SPREAD = {"n": 4, "q1": 1.0, "q3": 2.0}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"values": {}}], "KeyError: 'name'"),
        ([{"name": "a", "values": {"tpot_ms": 3}, "spread": {"tpot_ms": 3}}], "TypeError"),
        ([{"name": "a", "values": {}, "spread": {"tpot_ms": SPREAD}}], "KeyError: 'tpot_ms'"),
        ([{"name": "a", "values": {"tpot_ms": "3"}, "spread": {"tpot_ms": SPREAD}}], "no number"),
        ([{"name": "a", "values": {}}, {"name": "a", "values": {}}], "twice"),
        (7, "TypeError"),
    ],
)
def test_a_file_of_another_form_is_refused(rows: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        compare.read_recorded(broken(tmp_path / "a.json", rows))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.json"], "1 files: two are compared"),
        (["a.json", "b.json", "c.json"], "3 files: two are compared"),
        (["a.json", "--before", "x", "--after", "y"], "1 files: two are compared"),
        (["a.json", "b.json", "--after", "x"], "--after goes with --before"),
        (["--before", "x"], "held against nothing"),
        (["--before", "x", "--before_folder", "nowhere"], "is no checkout"),
        (["a.json", "b.json", "--fail_on", "faster"], "allowed: slower, different"),
    ],
)
def test_what_is_no_comparison_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        compare.parse(words)


def command(path: Path, name: str, *ms: float) -> str:
    """A command that writes a file with each of these times in turn."""
    source = path / f"{name}.py"
    source.write_text(
        "import json, pathlib, sys\n"
        f"seen = pathlib.Path({str(path / name)!r})\n"
        "turn = len(seen.read_text()) if seen.exists() else 0\n"
        "seen.write_text('x' * (turn + 1))\n"
        f"ms = {list(ms)!r}[turn % {len(ms)}]\n"
        "row = {'name': '1x2x3', 'values': {'tpot_ms': ms}, 'spread': {'tpot_ms': {'n': 1}}}\n"
        f"row['tokens_crc32'] = {len(ms)}\n"
        "made = {'device': {}, 'versions': {}, 'suites': {'throughput': {'rows': [row]}}}\n"
        "pathlib.Path(sys.argv[-1]).write_text(json.dumps(made))\n"
    )
    return f"python {shlex.quote(str(source))}"


def test_two_commands_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--before", command(tmp_path, "b", 2.0, 4.0), "--after", command(tmp_path, "a", 1, 2)]
    written = tmp_path / "turns.json"
    assert compare.main([*words, "--turns", "6", "--output_file", str(written)]) == 0
    said = capsys.readouterr()
    assert "2.000 to 2.000  faster" in said.out
    assert "the same tokens in 1x2x3" in said.err
    made = compare.read_recorded(written)
    assert made.cases["before: throughput: 1x2x3"]["tpot_ms"].median == 3.0
    other = ["--before", command(tmp_path, "c", 1.0), "--after", command(tmp_path, "a", 1, 1)]
    assert compare.main([*other, "--turns", "1"]) == 0
    assert "the same tokens in no case; others in 1x2x3" in capsys.readouterr().err


def test_a_command_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main(["--before", "python -m nowhere", "--after", "x", "--turns", "1"]) == 1
    assert "No module named" in capsys.readouterr().err


def test_a_checkouts_modules_come_before_those_on_the_callers_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/has/paddle")
    writes = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[2], 'w'))"
    found = TurnCommand(["python", "-c", writes], tmp_path).file()["PYTHONPATH"]
    assert found == f"{tmp_path}:{tmp_path / 'csrc'}:/has/paddle"


@pytest.mark.slow
def test_a_build_beside_itself_makes_the_same_tokens(
    compiled: library.Library, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"{sys.executable} -m predict.bench.throughput --model_name_or_path examples/demo_model"
    run += " --dtype float32 --device cpu --inference_model --append_attn --repetitions 1"
    words = ["--before", f"{run} --cases 1x16x5,2x32x1", "--before_folder", str(ROOT)]
    assert compare.main([*words, "--turns", "2"]) == 0
    assert "the same tokens in 1x16x5, 2x32x1; others in none" in capsys.readouterr().err
