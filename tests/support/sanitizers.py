"""What a process needs for a library that finds errors."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import build


def environment(sanitizers: Sequence[str]) -> dict[str, str]:
    """What a process needs for a library of that build; skips the test where it cannot be had."""
    try:
        return build.sanitizer_environment(build.find_compiler(), build.find_paddle(), sanitizers)
    except build.BuildError as error:
        pytest.skip(str(error))
