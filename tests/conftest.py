"""Options and markers of the whole test suite."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from predict.device import library
from tests.fake_gpu.libraries import ENVIRONMENT


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skipped = {}
    if not config.getoption("--slow"):
        skipped["slow"] = pytest.mark.skip(reason="takes minutes; run with --slow")
    if not Path("/proc/driver/nvidia/version").is_file() and ENVIRONMENT not in os.environ:
        skipped["gpu"] = pytest.mark.skip(reason="no NVIDIA driver")
    for item in items:
        for name, mark in skipped.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(mark)


@pytest.fixture(scope="session")
def compiled() -> library.Library:
    """The loaded operator library; tests that ask for it are skipped where none was built."""
    if library.find() is None:
        pytest.skip(f"no compiled operators; build them: {library.build_command()}")
    return library.require()
