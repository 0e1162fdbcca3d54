"""A checkout is carried to machines without a network: what is tracked stays small."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.paths import ROOT

MOST_BYTES = 50 << 20
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
