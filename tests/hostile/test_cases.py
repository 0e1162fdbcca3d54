"""Every row of every table: `CASES` of the modules cases_*.py beside this one."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.hostile.case import Case, Sandbox

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("cases_*.py"))
CASES: list[Case] = [
    case for name in MODULES for case in importlib.import_module(f"tests.hostile.{name}").CASES
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case_ends_as_its_row_says(
    case: Case, sandbox: Sandbox, capfd: pytest.CaptureFixture[str]
) -> None:
    case.run(sandbox, capfd)


def test_names_are_unique() -> None:
    names = [case.name for case in CASES]
    assert len(names) == len(set(names))
