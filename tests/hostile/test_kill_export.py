"""Exports that a signal ends at any moment: what is there is whole, and running anew is enough."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

from tests.hostile.kill import SIGNALS, Ended, contents, locks, moments, run_command
from tests.support import tiny
from tests.support.paths import ROOT


class Exports:
    """Exports of one model, each in a process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = tiny.write_with_tokenizer(folder / "model")
        self.seconds = 0.0  # that the whole one takes

    @cached_property
    def whole(self) -> dict[str, bytes]:
        """What a run that nobody disturbs writes."""
        return self._export("whole", 64)

    @cached_property
    def before(self) -> dict[str, bytes]:
        """What `earlier` holds."""
        return self._export("earlier", 32)

    @property
    def earlier(self) -> Path:
        """An export of other settings."""
        assert self.before
        return self.folder / "earlier"

    def _export(self, name: str, max_length: int) -> dict[str, bytes]:
        ended = self.run(self.folder / name, max_length=max_length)
        assert ended.code == 0, ended.said
        self.seconds = ended.seconds
        return contents(self.folder / name)

    def run(
        self,
        out: Path,
        at: float | None = None,
        number: int = signal.SIGTERM,
        overwrite: bool = False,
        max_length: int = 64,
    ) -> Ended:
        flags: list[str | Path] = ["--model_name_or_path", self.model, "--output_path", out]
        flags += ["--device", "cpu"]
        flags += ["--dtype", "float32", "--max_length", str(max_length)]
        return run_command(
            "export.export_model", [*flags, "--overwrite", str(overwrite).lower()], at, number
        )


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("kill"))


def check(exports: Exports, number: int, folder: Path, count: int, overwrite: bool) -> None:
    """Ends exports at `count` moments, each where the one before left off, then one runs on."""
    out = folder / "out"
    whole = exports.whole
    for moment in moments(exports.seconds, count, seed=int(number)):
        if overwrite:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(exports.earlier, out)
        ended = exports.run(out, moment, number, overwrite)
        assert ended.code == 0 or ended.was_ended_by(number), ended.said
        assert "Traceback" not in ended.said or ended.code == -number, ended.said
        found = contents(out) if out.exists() else None
        assert found == whole or found == (exports.before if overwrite else None)
        assert found == whole or ended.code != 0
        if ended.code != -signal.SIGKILL:
            assert [path for path in folder.iterdir() if path != out] == [], (ended, moment)
        if not overwrite:
            shutil.rmtree(out, ignore_errors=True)
    ended = exports.run(out, overwrite=overwrite)
    assert ended.code == 0, ended.said
    assert contents(out) == whole
    assert not locks(folder)
    assert [path for path in folder.iterdir() if path != out] == []


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True], ids=["new", "over an earlier one"])
@pytest.mark.parametrize("number", SIGNALS)
def test_export_ended_at_any_moment_runs_anew(
    exports: Exports, number: int, overwrite: bool, tmp_path: Path
) -> None:
    check(exports, number, tmp_path, count=4, overwrite=overwrite)


def test_export_that_finds_no_room_says_so_and_leaves_what_was_there(
    exports: Exports, tmp_path: Path
) -> None:
    """Paddle writes what fits, and says nothing: a limit on file sizes stands for a full disk."""
    out = tmp_path / "out"
    shutil.copytree(exports.earlier, out)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "export.export_model",
        "--model_name_or_path",
    ]
    command += [exports.model, "--dtype", "float32", "--device", "cpu"]
    command += ["--output_path", out, "--overwrite"]
    limit = (300 << 10, 300 << 10)
    ended = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert ended.returncode == 1, ended.stderr
    assert "was not written whole" in ended.stderr
    assert "make room" in ended.stderr
    assert contents(out) == exports.before
    assert [path for path in tmp_path.iterdir() if path != out] == []
