"""A rank's process of tests/gpu: over the fake GPU's libraries where the tests are.

As predict.rank_process, which it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

from predict.config import ranks
from predict.ranks.front import Ranks
from tests.fake_gpu import chosen

# Of the environment: 1 runs steps operator by operator, and refuses to join logits of all ranks.
NO_GRAPHS, NO_JOINING = "REGATTA_TEST_NO_GRAPHS", "REGATTA_TEST_NO_JOINING"


def of_tests(patch: Any) -> None:
    """Has models over ranks of GPUs take this module's processes. patch: pytest's monkeypatch."""
    patch.setattr(ranks, "DEVICES", ("cpu", "gpu"))
    patch.setattr("predict.ranks.start.Ranks", partial(Ranks, module=__name__))


def _refused(x: Any, counts: Sequence[int]) -> Any:
    raise RuntimeError("logits of all ranks are joined")


def main() -> None:
    """Runs the rank."""
    ranks.DEVICES = ("cpu", "gpu")
    if (folder := chosen.folder()) is not None:
        chosen.select(folder)
    from predict import rank_process
    from predict.engine.runner import gpu, graphs

    if os.environ.get(NO_JOINING) == "1":
        from predict.ops import compiled

        compiled.gather_ranks = _refused

    graphs.OFTEN_MET = graphs.OFTEN_MET_OF_MANY = 2  # as tests/gpu/conftest.py
    cache = graphs.GraphCache
    if os.environ.get(NO_GRAPHS) == "1":
        with mock.patch.object(gpu, "GraphCache", lambda _, most: cache(None, most)):
            rank_process.main(sys.argv[1:])
    rank_process.main(sys.argv[1:])


if __name__ == "__main__":
    main()
