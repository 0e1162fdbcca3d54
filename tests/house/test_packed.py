"""Goldens that are kept compressed: what is unpacked is what is stored, and git ignores it."""

from __future__ import annotations

import lzma
import os
import subprocess
from pathlib import Path

import pytest

from tests.support import packed
from tests.support.paths import ROOT

STORED = sorted(packed.TESTS.rglob(f"*{packed.SUFFIX}"))
TARGETS = [packed.unpacked_name(path) for path in STORED]


def test_what_tests_read_is_what_is_stored() -> None:
    assert ROOT / "tests/golden/llama_gqa/model.safetensors" in TARGETS
    others = [  # unpack left them: they were newer
        target
        for path, target in zip(STORED, TARGETS, strict=True)
        if path.stat().st_mtime_ns != target.stat().st_mtime_ns
        and lzma.decompress(path.read_bytes()) != target.read_bytes()
    ]
    assert not others, "pack them: python -m tests.support.packed"


def test_git_ignores_what_is_unpacked_and_tracks_nothing_that_it_ignores() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git here")
    names = "\0".join(str(path.relative_to(ROOT)) for path in TARGETS)
    command = ["git", "check-ignore", "--no-index", "-z", "--stdin"]
    done = subprocess.run(command, cwd=ROOT, input=names, capture_output=True, text=True)
    assert done.stdout.rstrip("\0") == names
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not done.stdout, "pack these, and `git rm --cached` them: python -m tests.support.packed"


@pytest.mark.parametrize("data", [b"", b"text " * 100, os.urandom(64) * 3])
def test_a_file_comes_back_whole_and_where_it_is_missing_or_older(
    tmp_path: Path, data: bytes
) -> None:
    path = tmp_path / "a folder" / "model.safetensors"
    path.parent.mkdir()
    path.write_bytes(data)
    stored = packed.pack(path)
    assert stored.name == "model.safetensors.xz"
    assert lzma.decompress(stored.read_bytes()) == data
    path.unlink()
    packed.unpack(tmp_path)
    assert path.read_bytes() == data
    path.write_bytes(b"newer")
    packed.unpack(tmp_path)
    assert path.read_bytes() == b"newer"
    os.utime(path, ns=(0, stored.stat().st_mtime_ns - 1))
    packed.unpack(tmp_path)
    assert path.read_bytes() == data
    assert {each.name for each in path.parent.iterdir()} == {path.name, stored.name}
