""".ci/run and the hooks of .pre-commit-config.yaml: the same checks of style, from one place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.paths import ROOT

STYLE = ROOT / ".ci" / "style"


def style(*arguments: str, program: Path = STYLE) -> subprocess.CompletedProcess[str]:
    # Where pip puts the linters, whether or not the environment is activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.run(
        [str(program), *arguments],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def commands_of_style(text: str) -> list[list[str]]:
    """The arguments of each `.ci/style` that a script runs."""
    return [line.split() for line in re.findall(r"^\.ci/style(.*)$", text, re.MULTILINE)]


def test_hooks_and_ci_run_the_same_checks() -> None:
    names = style("--list").stdout.split()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"^ *entry: (.*)$", hooks, re.MULTILINE)
    assert entries == [f".ci/style {name}" for name in names]
    # Every hook runs what is installed here, and on all files.
    assert len(entries) == hooks.count("language: system") == hooks.count("pass_filenames: false")
    runs = commands_of_style((ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    assert {name for run in runs for name in run or names} == set(names)


def test_c_and_cuda_sources_are_checked_before_anything_slow() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    first = commands_of_style(text)[0]
    assert "clang-format" in first
    assert text.index(f".ci/style {' '.join(first)}") < text.index('bash -c "set -o pipefail')


def test_ci_run_runs_the_tests_that_take_minutes_within_a_limit() -> None:
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (line,) = re.findall(r"^(.*) pytest --slow -m slow\b", text, re.MULTILINE)
    assert re.match(r"timeout .*\b\d+$", line)


def test_coverage_is_told_by_room(tmp_path: Path) -> None:
    counts = {
        "predict/llm.py": (3, 4),
        "predict/engine/engine.py": (1, 2),
        "predict/text/tool_calls/json.py": (0, 1),
        "quant/data.py": (5, 5),
    }
    files = {
        name: {"summary": {"covered_lines": covered, "num_statements": count}}
        for name, (covered, count) in counts.items()
    }
    report = tmp_path / "coverage.json"
    report.write_text(json.dumps({"files": files}))
    process = subprocess.run(
        [sys.executable, ROOT / ".ci" / "coverage", report],
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line.split() for line in process.stdout.splitlines()] == [
        ["room", "statements", "run"],
        ["predict", "4", "75.0%"],
        ["predict/engine", "2", "50.0%"],
        ["predict/text", "1", "0.0%"],
        ["quant", "5", "100.0%"],
        ["all", "12", "75.0%"],
    ]


def test_unknown_check_is_refused_with_the_known_names() -> None:
    process = style("ruff")
    assert process.returncode == 2
    assert "no check ruff (there are: clang-format ruff-format" in process.stdout


def test_source_that_clang_format_would_change_fails_the_check(tmp_path: Path) -> None:
    for folder in (".ci", "csrc/cuda", "tests", "benchmarks"):
        (tmp_path / folder).mkdir(parents=True)
    for name in (".ci/style", ".clang-format"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    program = tmp_path / ".ci" / "style"
    program.chmod(0o755)
    source = tmp_path / "csrc" / "cuda" / "one.cuh"
    source.write_text("int one() { return 1; }\n")
    assert style("clang-format", program=program).returncode == 0
    source.write_text("int one()   { return 1; }\n")
    process = style("clang-format", program=program)
    assert process.returncode != 0
    assert "one.cuh:1" in process.stdout
