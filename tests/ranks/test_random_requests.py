"""Random requests of all kinds on two ranks: the text of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from predict.device import library
from tests.support.rank_traffic import METHODS, compare, write_folder

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_text_is_that_of_one_process(tmp_path: Path, method: str) -> None:
    write_folder(tmp_path)
    happened = compare(tmp_path, method, 20, seed=len(method))
    assert happened["compared"] >= 15
    assert happened["preemptions, one"] > 0
    assert happened["preemptions, two"] > 0
    if method != "none":
        assert happened["drafts, two"] > 0
