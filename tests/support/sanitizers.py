"""Libraries that find errors, or are compiled quickly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import build
from tests.support.sanitized import TWO_ISAS


def environment(sanitizers: Sequence[str]) -> dict[str, str]:
    """What a process needs for a library of that build; skips the test where it cannot be had."""
    try:
        return build.sanitizer_environment(build.find_compiler(), build.find_paddle(), sanitizers)
    except build.BuildError as error:
        pytest.skip(str(error))


def last_isa_alone() -> str:
    """The compiler's flags for one instruction set, where this CPU has it (cpu/foreach_isa.h)."""
    return "-DREGATTA_LAST_ISA_ALONE" if _has_last_isa() else ""


def two_isas() -> str:
    """The compiler's flags for two instruction sets, where this CPU has them."""
    return TWO_ISAS if _has_last_isa() else ""


def _has_last_isa() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()
