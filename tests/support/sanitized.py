"""A pytest plugin: the tests that a library for finding errors runs, of those that are named.

`pytest -p tests.support.sanitized`. Such a library is many times slower, and what it looks for,
accesses outside of memory and races, shows in few of a test's combinations: of each test those stay
in which every two values of its parameters meet once, on instruction sets that this CPU and the
library have. Under ThreadSanitizer it is the best of these sets alone, and each value once: threads
share the work in the same way in all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest

from predict.device.library import Library, require
from tests.support.cpu_kernels import CANDIDATES, refusal

Pair = frozenset[tuple[str, str]]

TWO_ISAS = "-DREGATTA_TWO_ISAS"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects all but the chosen combinations."""
    kept = set(selected(require(), items))
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def selected(library: Library, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that run with `library`."""
    together = 1 if library.metadata.sanitizer == "thread" else 2
    of_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_function.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = []
    for group in of_function.values():
        names = candidates(library, group[0])
        runnable = [item for item in group if candidate_of(item) in names]
        rows = [values_of(item) for item in runnable]
        chosen += [runnable[index] for index in covering(rows, together)]
    return chosen


def candidates(library: Library, item: pytest.Item) -> Sequence[str | None]:
    """The instruction sets that a test runs on; None is its own choice."""
    operator = getattr(getattr(item, "module", None), "OPERATOR", "linear")
    accepted = [name for name in CANDIDATES if not refusal(library, operator, name)]
    if library.metadata.sanitizer == "thread":
        accepted = accepted[-1:]
    elif TWO_ISAS in library.metadata.flags.split():
        accepted = [name for name in accepted if name in ("avx2", "avx512_bf16", accepted[-1])]
    return [None, *accepted]


def candidate_of(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return None if callspec is None else callspec.params.get("candidate")


def values_of(item: pytest.Item) -> Mapping[str, str]:
    """What each parameter of a test is, as a word."""
    callspec = getattr(item, "callspec", None)
    return {} if callspec is None else {k: repr(value) for k, value in callspec.params.items()}


def covering(rows: Sequence[Mapping[str, str]], together: int = 2) -> list[int]:
    """Few of the rows, in order, with every pair of values of two parameters that any row has.

    together: 1 where every single value is enough.
    """
    pairs = [{pair for pair in pairs_of(row) if len(pair) <= together} for row in rows]
    missing: set[Pair] = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def pairs_of(row: Mapping[str, str]) -> set[Pair]:
    """The pairs of a row's values, and each value alone: a row may have one or none."""
    values = [*row.items()]
    alone = [[], *([value] for value in values)]
    return {*map(frozenset, [*alone, *combinations(values, 2)])}
