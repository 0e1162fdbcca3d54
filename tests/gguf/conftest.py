"""The downloads of real models, shared by the modules that need them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.pages import FOLDERS
from tests.support.paths import ROOT
from tests.support.real_models import download


@pytest.fixture(scope="session")
def real_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the repository's root, in which the page's downloads ran."""
    made = tmp_path_factory.mktemp("real_models")
    for name in FOLDERS:
        (made / name).symlink_to(ROOT / name)
    try:
        download(made)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"pip cannot download the models: {error.stderr.strip()[-300:]}")
    return made
