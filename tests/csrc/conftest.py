"""What tests of csrc/ share."""

from __future__ import annotations

from pathlib import Path

import pytest

import build
from tests.support import gemm_choices as choices
from tests.support import host_programs


@pytest.fixture(scope="session")
def gemm_choices() -> choices.GemmChoices:
    """Which kernel multiplies (csrc/cuda/gemm/select.cu)."""
    try:
        return choices.compiled()
    except build.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def select_kernels() -> Path:
    """select_kernels.cc, which answers for attention, experts and ranks."""
    try:
        return host_programs.compiled(
            "select_kernels",
            (
                *("attention/select.cu", "attention/latent/select.cu", "experts/select.cu"),
                "ranks/select.cu",
            ),
        )
    except build.BuildError as error:
        pytest.skip(str(error))
