"""What is tracked is small, as a checkout is carried to machines; so are functions and modules."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

from tests.support import packed
from tests.support.paths import ROOT

MOST_BYTES = 50 << 20
MOST_LINES = 450  # of a module of the engine room
MOST_OF_A_FUNCTION = 80  # lines
# What .gitignore names, where no git can tell: a copy of the tracked files in which things run.
IGNORED = {
    *("__pycache__", ".venv", "build", "dist", "lib", ".pytest_cache", ".hypothesis", "site"),
    *(".mypy_cache", ".ruff_cache", ".import_linter_cache", ".gpu", ".git"),
}


def tracked() -> list[Path]:
    """The tracked files and new ones; in a copy without git, all that are not ignored."""
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return [
            path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()
        ]
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not Path(f"{path}{packed.SUFFIX}").exists()
        and not any(
            part in IGNORED or part.endswith(".egg-info") for part in path.relative_to(ROOT).parts
        )
        and not path.name.startswith(".coverage")
    ]


def test_tracked_files_are_at_most_50_mib() -> None:
    files = tracked()
    assert ROOT / "README.md" in files
    sizes = sorted(((path.lstat().st_size, path) for path in files), reverse=True)
    total = sum(size for size, _ in sizes)
    largest = ", ".join(f"{path.relative_to(ROOT)} {size:,}" for size, path in sizes[:8])
    assert total <= MOST_BYTES, f"{total:,} bytes; the largest: {largest}"


def test_modules_of_the_engine_room_read_in_one_sitting() -> None:
    room = [*(ROOT / "predict" / "engine").rglob("*.py")]
    room += [ROOT / "predict" / f"{name}.py" for name in ("llm", "async_llm", "build")]
    lines = {path.name: len(path.read_text().splitlines()) for path in room}
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}


def test_functions_fit_on_a_screen_or_two() -> None:
    folders = [ROOT / name for name in ("predict", "quant", "export")]
    long = [
        f"{path.relative_to(ROOT)}: {each.name}"
        for path in (file for folder in folders for file in folder.rglob("*.py"))
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (each.end_lineno or 0) - each.lineno >= MOST_OF_A_FUNCTION
    ]
    assert long == []
