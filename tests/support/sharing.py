"""How two processes of pytest-xdist share the tests."""

from __future__ import annotations

import functools
import re

from xdist.scheduler import LoadScopeScheduling

from tests.support.paths import ROOT

# A module's fixture, or answers that are kept for the next test.
SHARED_WORK = re.compile(r'scope="module"|^@(functools\.)?(lru_)?cache\b', re.MULTILINE)


class Scheduling(LoadScopeScheduling):
    """Sends tests one by one, and those that share work to one process: it is done once."""

    def _split_scope(self, nodeid: str) -> str:
        return shared_by(nodeid.partition("::")[0]) or nodeid


@functools.cache
def shared_by(path: str) -> str | None:
    """A name for the work that a file's tests share; None where they share none."""
    file = ROOT / path
    source = file.read_text(encoding="utf-8")
    if "fake_gpu: Path" in source:
        return "the libraries of the fake GPU"
    conftest = file.with_name("conftest.py")
    if conftest.is_file() and conftest.parent != ROOT / "tests":
        source += conftest.read_text(encoding="utf-8")
    return path if SHARED_WORK.search(source) else None
