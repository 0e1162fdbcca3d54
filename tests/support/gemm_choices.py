"""Asks csrc/cuda/gemm/select.cu which kernel multiplies, without CUDA."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import host_programs


@dataclass(frozen=True)
class Choice:
    """A row of the table and its kernel, or "" and why there is none."""

    row: int
    kernel: str
    reasons: str = ""


@dataclass(frozen=True)
class Candidate:
    """A row of the table: its name, kernel, and compute capabilities * 10."""

    name: str
    kernel: str
    min_arch: int
    max_arch: int


class GemmChoices:
    """The choice, as a program of tests/csrc that reads a product and a GPU per line."""

    def __init__(self, program: Path) -> None:
        self.program = program

    def ask(self, lines: Sequence[str]) -> list[Choice]:
        """Returns the choice for each line; select_gemm.cc says what may stand in one."""
        output = self._run(input="\n".join(lines)).splitlines()
        assert len(output) == len(lines)
        return [_choice(line) for line in output]

    def ask_groups_tiles(self, lines: Sequence[str]) -> list[tuple[int, ...]]:
        """Returns tokens, blocks, KiB and grain of gemm_packed_groups_sm90's tile for each line."""
        output = self._run("groups", input="\n".join(lines)).splitlines()
        return [tuple(map(int, line.split())) for line in output]

    @functools.cache  # noqa: B019 - one object per session
    def table(self) -> tuple[Candidate, ...]:
        """Returns all candidates in their order."""
        rows = [line.split() for line in self._run("table").splitlines()]
        return tuple(
            Candidate(name, kernel, int(first), int(last)) for name, kernel, first, last, _ in rows
        )

    def _run(self, *arguments: str, input: str = "") -> str:  # noqa: A002 - subprocess's word
        command = [str(self.program), *arguments]
        return subprocess.run(
            command, input=input, capture_output=True, text=True, check=True
        ).stdout


def _choice(line: str) -> Choice:
    row, _, rest = line.partition(" ")
    return Choice(-1, "", rest) if row == "none" else Choice(int(row), rest)


def compiled() -> GemmChoices:
    """Returns the choice; raises build.BuildError where there is no C++ compiler."""
    return GemmChoices(host_programs.compiled("select_gemm", ("gemm/select.cu",)))
