"""Processes of ranks, which all tests of a run share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.support.rank_models import RankProcesses


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankProcesses]]:
    """The processes of so many ranks, which stay."""
    with ExitStack() as ends:
        yield cache(lambda size: ends.enter_context(RankProcesses(size)))
