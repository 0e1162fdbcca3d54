"""The model that every case gets a copy of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile.case import Sandbox, make_sandbox
from tests.support import tiny


@pytest.fixture(scope="session")
def model_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer; not to be changed."""
    return tiny.write_with_tokenizer(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture
def sandbox(tmp_path: Path, model_template: Path) -> Sandbox:
    """A folder for one case."""
    return make_sandbox(tmp_path, model_template)
