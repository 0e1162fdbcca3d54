"""What tests of csrc/ share."""

from __future__ import annotations

import pytest

import build
from tests.support import gemm_choices as choices


@pytest.fixture(scope="session")
def gemm_choices() -> choices.GemmChoices:
    """Which kernel multiplies (csrc/cuda/gemm/select.cu)."""
    try:
        return choices.compiled()
    except build.BuildError as error:
        pytest.skip(str(error))
