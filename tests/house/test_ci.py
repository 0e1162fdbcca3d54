""".ci/run and the hooks of .pre-commit-config.yaml: the same checks of style, from one place."""

from __future__ import annotations

import importlib.machinery
import json
import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

import build
from tests.support.paths import ROOT
from tests.support.quick import QUICK

STYLE = ROOT / ".ci" / "style"
RUN = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


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


def test_hooks_and_ci_run_the_same_checks() -> None:
    names = style("--list").stdout.split()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    entries = re.findall(r"^ *entry: (.*)$", hooks, re.MULTILINE)
    assert entries == [*(f".ci/style {name}" for name in names), "pytest --quick"]
    # Every hook runs what is installed here, and on all files.
    assert len(entries) == hooks.count("language: system") == hooks.count("pass_filenames: false")
    runs = [line.split() for line in re.findall(r"^\.ci/style ([^#\n]*)", RUN, re.MULTILINE)]
    assert {name for run in runs for name in run} == set(names)
    assert RUN.index(".ci/style clang-format") < RUN.index("begin install")  # seconds come first


def test_every_stage_has_a_budget() -> None:
    budgets = RUN[RUN.index("minutes=(") : RUN.index(")\n", RUN.index("minutes=("))]
    stages = set(re.findall(r'^begin "?([^"\n]*)"?$', RUN, re.MULTILINE))
    assert stages == {name.strip('"') for name in re.findall(r"\[([^]]*)\]=\d+", budgets)}
    assert re.search(r"^timeout .* \\\n  pytest --slow -m slow\b", RUN, re.MULTILINE)


def test_every_cuda_source_is_compiled_for_each_architecture_that_it_tells_apart() -> None:
    assert re.search(r"^ *\.ci/cuda$", RUN, re.MULTILINE)
    path = str(ROOT / ".ci" / "cuda")
    cuda = types.ModuleType("cuda")
    cuda.__file__ = path
    importlib.machinery.SourceFileLoader("cuda", path).exec_module(cuda)
    made = {path.name: cuda.compiled_for(path, cuda.ARCHITECTURES) for path in build.cuda_sources()}
    assert made["activate.cu"] == made["attention_decode_sm80.cu"] == ("80",)
    assert made["gemm_sm90.cu"] == ("90a",)
    # Their headers have a way for 89 and newer.
    assert made["rope_and_cache_write.cu"] == made["gemm_codes_mma.cu"] == ("80", "90a")
    assert set(made.values()) == {("80",), ("90a",), ("80", "90a")}


@pytest.mark.parametrize("words", [["--coverge"], ["--coverage", "x"]])
def test_an_argument_that_ci_does_not_know_is_refused(words: list[str]) -> None:
    # Without what it does beyond its arguments, were they taken.
    head = RUN[: RUN.index("\nroot=")]
    done = subprocess.run(["bash", "-c", head, "run", *words], capture_output=True, check=False)
    assert (done.returncode, b"allowed: --coverage" in done.stderr) == (2, True)


def test_quick_tests_are_of_every_room() -> None:
    rooms = {test.split("::")[0].rpartition("/")[0] for test in QUICK}
    needing = {f"tests/{room}" for room in ("examples", "fake_device", "fake_gpu", "gpu", "ray")}
    found = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert found - needing == rooms


def test_seconds_are_told_by_file(tmp_path: Path) -> None:
    report = tmp_path / "tests.xml"
    cases = [("tests.ops.test_tiles", 2.0), ("tests.test_llm.TestX", 0.5), ("tests.test_llm", 9.6)]
    rows = "".join(f'<testcase classname="{name}" time="{time}"/>' for name, time in cases)
    report.write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    command = [sys.executable, str(ROOT / ".ci" / "seconds"), str(report)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in said.splitlines()] == [
        ["tests.test_llm", "2", "tests", "10", "s"],
        ["tests.ops.test_tiles", "1", "tests", "2", "s"],
        ["all", "3", "tests", "12", "s"],
    ]


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
    for folder in (".ci", "csrc/cuda", "tests", "benchmarks", "examples"):
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


@pytest.fixture
def counted(tmp_path: Path) -> Path:
    """The meter of lines in a folder with three lines of a product and one of a test."""
    for name in (".ci/style", "predict/one.py", "quant/two.h", "tests/a.py", "tests/golden/b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / ".ci" / "style").write_bytes(STYLE.read_bytes())
    (tmp_path / ".ci" / "style").chmod(0o755)
    (tmp_path / "predict" / "one.py").write_text("1\n2\n")
    (tmp_path / "quant" / "two.h").write_text("3\n")
    (tmp_path / "quant" / "data.json").write_text("4\n")
    (tmp_path / "tests" / "a.py").write_text("5\n")
    (tmp_path / "tests" / "golden" / "b.py").write_text("6\n")
    (tmp_path / ".ci" / "lines").write_text("3 predict quant\n1 tests\n")
    (tmp_path / "CHANGELOG.md").write_text("- Lines may be 1,234.\n")
    return tmp_path


def meter(folder: Path) -> tuple[int, str, str]:
    """Its status, what it printed, and what .ci/lines says now."""
    process = style("lines", program=folder / ".ci" / "style")
    return process.returncode, process.stdout, (folder / ".ci" / "lines").read_text()


def test_lines_of_code_fall_by_themselves_and_do_not_rise(counted: Path) -> None:
    before = (counted / ".ci" / "lines").read_text()
    assert meter(counted) == (0, "", before)
    (counted / "tests" / "more.js").write_text("7\n8\n")
    said = "tests: 3 lines, 2 more than .ci/lines allows\n"
    assert meter(counted) == (1, said, before)
    (counted / "tests" / "more.js").unlink()
    (counted / "predict" / "one.py").write_text("1\n")
    assert meter(counted)[::2] == (0, "2 predict quant\n1 tests\n")


@pytest.mark.skipif(shutil.which("git") is None, reason="no git")
def test_the_number_of_lines_rises_with_a_line_in_the_changelog(counted: Path) -> None:
    def git(*words: str) -> None:
        of = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.hooksPath=none"]
        subprocess.run(["git", *of, *words], cwd=counted, check=True, capture_output=True)

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    (counted / "tests" / "a.py").write_text("5\n" * 1233)
    (counted / ".ci" / "lines").write_text("3 predict quant\n1233 tests\n")
    rose = "tests: .ci/lines rose from 1 to 1233, which CHANGELOG.md does not say\n"
    assert meter(counted)[:2] == (1, rose)
    git("commit", "-qam", "two")
    assert meter(counted)[:2] == (1, rose)
    (counted / "tests" / "a.py").write_text("5\n" * 1234)
    (counted / ".ci" / "lines").write_text("3 predict quant\n1234 tests\n")
    assert meter(counted)[:2] == (0, "")
