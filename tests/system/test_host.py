"""What the process takes of its host."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from predict.system import host


def test_frozen_objects_are_left_out_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "gc", gc)  # all tests have another
    kept: list[list[int]] = [[] for _ in range(1000)]
    with host.frozen_objects():
        assert gc.get_freeze_count() >= len(kept)
    assert gc.get_freeze_count() == 0


def test_files_that_were_read_leave_a_cgroup_its_memory(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "900"}
    files["memory.stat"] = "anon 300\ninactive_file 400\nactive_file 200"
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert host._cgroup_bytes(tmp_path) == 700
