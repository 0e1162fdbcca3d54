"""Runs of predict.bench.throughput become a suite of a dated file, and that a table."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import script

CASES = ("1x128x129", "1x1024x1")


def run(tpot_ms: float = 4.25, **changed: Any) -> dict[str, Any]:
    """What --output_file wrote, as far as it is read."""
    rows = []
    for case in CASES:
        tpot = tpot_ms if case == "1x128x129" else None
        samples = {"ttft_ms": [20.0, 21.0], "output_tokens_per_s": [1.0, 1.0]}
        rows.append(
            {
                "name": case,
                "values": {"ttft_ms": 20.51234567, "tpot_ms": tpot, "run_gbs": 1.0},
                "samples": samples | ({} if tpot is None else {"tpot_ms": [tpot]}),
                "limit": "bandwidth",
            }
        )
    command = "python -m x --output_file /home/a/base.json --lora_modules 0=/home/a/0 --dtype y"
    process = {"process start to ready": 5.0, "peak memory": 7}
    return {
        "device": {"name": "GPU"},
        "date": "2026-01-02",
        "versions": {"python": "3.12"},
        "settings": {"model": "examples/shapes/llama-3-8b", "speculate_method": None},
        "suites": {
            "throughput": {"command": command, "method": "m", "spread": "s", "rows": rows},
            "process": {"rows": [{"name": n, "values": {"value": v}} for n, v in process.items()]},
        },
    } | changed


def added(folder: Path, runs: dict[str, dict[str, Any]], suite: str = "adapters") -> dict[str, Any]:
    files = []
    for name, content in runs.items():
        files.append(folder / f"{name}.json")
        files[-1].write_text(json.dumps(content))
    path = folder / "2026-01-02.json"
    assert script("benchmarks/add_runs.py").main([str(path), suite, *map(str, files)]) == 0
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def test_a_run_becomes_rows_of_a_suite(tmp_path: Path) -> None:
    made = added(tmp_path, {"base": run()})
    assert list(made) == ["device", "date", "versions", "suites"]
    suite = made["suites"]["adapters"]
    first, second = suite["rows"]
    assert first == {
        "name": "base, 1x128x129",
        "run": "base",
        "case": "1x128x129",
        "values": {"ttft_ms": 20.5123, "tpot_ms": 4.25},
        "samples": {"ttft_ms": [20.0, 21.0], "tpot_ms": [4.25]},
        "limit": "bandwidth",
    }
    assert "tpot_ms" not in second["values"]
    entry = suite["runs"]["base"]
    assert entry["settings"] == {"model": "examples/shapes/llama-3-8b"}
    assert (entry["ready_s"], entry["peak_memory_bytes"]) == (5.0, 7)


def test_commands_keep_no_path_of_a_machine(tmp_path: Path) -> None:
    command = added(tmp_path, {"base": run()})["suites"]["adapters"]["runs"]["base"]["command"]
    assert shlex.split(command) == ["python", "-m", "x", "--lora_modules", "0=0", "--dtype", "y"]


def test_a_run_replaces_the_one_of_its_name_alone(tmp_path: Path) -> None:
    added(tmp_path, {"base": run()}, "experts")
    added(tmp_path, {"base": run(), "lora": run(9.0)})
    suites = added(tmp_path, {"lora": run(8.0)})["suites"]
    assert list(suites) == ["experts", "adapters"]
    tpot = {row["name"]: row["values"].get("tpot_ms") for row in suites["adapters"]["rows"]}
    assert tpot == {
        "base, 1x128x129": 4.25,
        "base, 1x1024x1": None,
        "lora, 1x128x129": 8.0,
        "lora, 1x1024x1": None,
    }


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("device", {"name": "another"}),
        ("date", "2026-01-03"),
        ("versions", {"python": "3.13"}),
    ],
)
def test_runs_of_another_device_day_or_build_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, other: Any
) -> None:
    before = added(tmp_path, {"base": run()})
    with pytest.raises(SystemExit):
        added(tmp_path, {"lora": run(**{name: other})})
    assert f"{name} of lora is {other}" in capsys.readouterr().err
    assert json.loads((tmp_path / "2026-01-02.json").read_text()) == before


def test_what_no_benchmark_wrote_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        added(tmp_path, {"base": {"device": {}}})
    assert "give what its --output_file wrote" in capsys.readouterr().err
    assert not (tmp_path / "2026-01-02.json").exists()


def test_the_table_of_adapters_has_the_runs_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = script("benchmarks/make_tables.py")
    added(tmp_path, {"base": run(), "lora": run(9.0)})
    monkeypatch.setattr(tables, "H200_RUNS", (tmp_path / "2026-01-02.json",))
    lines = tables.h200_adapters().splitlines()
    assert lines[2] == "| decode, batch 1 | 4.25 | 9.00 |  |  | 6.66 |"
    assert lines[-1] == "| prompt of 1,024 tokens | 20.51 | 20.51 |  |  | 53.6 |"
