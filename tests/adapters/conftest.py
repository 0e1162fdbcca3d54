"""Adapters of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tiny
from tests.support.adapters import write_seven


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_seven(tmp_path_factory.mktemp("adapters"), tiny.CONFIG)
