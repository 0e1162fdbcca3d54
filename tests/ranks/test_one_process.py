"""Commands that run in one process refuse several ranks by name, before they read weights."""

from __future__ import annotations

from pathlib import Path

from tests.support.paths import DEMO
from tests.support.processes import run_python


def test_an_export_for_several_ranks_is_refused(tmp_path: Path) -> None:
    done = run_python(
        *("export/export_model.py", "--model_name_or_path", DEMO, "--device", "cpu"),
        *("--output_path", tmp_path / "out", "--tensor_parallel_degree", "2"),
    )
    assert done.returncode == 2
    assert "tensor_parallel_degree 2: this command runs in one process" in done.stderr
    assert not (tmp_path / "out").exists()
