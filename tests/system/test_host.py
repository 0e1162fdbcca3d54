"""What the process takes of its host."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from predict.system import host


def test_frozen_objects_are_left_out_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "gc", gc)  # all tests have another
    kept: list[list[int]] = [[] for _ in range(1000)]
    with host.frozen_objects():
        assert gc.get_freeze_count() >= len(kept)
    assert gc.get_freeze_count() == 0


def test_pages_of_library_files_come_back_when_they_are_read() -> None:
    text = "import numpy; from predict.system import host; print(host.give_back_library_pages()); "
    text += "assert numpy.ones((64, 64)).dot(numpy.ones(64)).sum() == 4096"
    process = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, check=True
    )
    assert int(process.stdout) > 1 << 20


def test_processes_share_the_cores_of_nodes(tmp_path: Path) -> None:
    for node, text in {"node0": "0-3,8", "node1": "4-7", "node10": "9,10", "node2": ""}.items():
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(text + "\n")
    nodes = host.node_cores(tmp_path)
    assert nodes == [{0, 1, 2, 3, 8}, {4, 5, 6, 7}, {9, 10}]
    allowed = set(range(1, 8))

    def shares(count: int) -> list[set[int] | None]:
        return [host.cores_of_share(index, count, nodes, allowed) for index in range(count)]

    assert shares(2) == [{1, 2, 3}, {4, 5, 6, 7}]
    assert shares(1) == [allowed]
    assert shares(3) == [None] * 3  # four threads on three cores
    assert shares(4) == [{1, 2, 3}, {1, 2, 3}, {4, 5, 6, 7}, {4, 5, 6, 7}]
    assert host.cores_of_share(0, 2, nodes, {3, 4, 5, 6, 7}) is None  # two on one
    assert host.cores_of_share(0, 2, nodes, {4, 5}) is None


def test_files_that_were_read_leave_a_cgroup_its_memory(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "900"}
    files["memory.stat"] = "anon 300\ninactive_file 400\nactive_file 200"
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert host._cgroup_bytes(tmp_path) == 700
