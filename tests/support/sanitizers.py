"""Libraries that find errors, or are compiled quickly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import build


def environment(sanitizers: Sequence[str]) -> dict[str, str]:
    """What a process needs for a library of that build; skips the test where it cannot be had."""
    try:
        return build.sanitizer_environment(build.find_compiler(), build.find_paddle(), sanitizers)
    except build.BuildError as error:
        pytest.skip(str(error))


def last_isa_alone() -> str:
    """The compiler's flags for one instruction set, where this CPU has it (cpu/foreach_isa.h)."""
    has_it = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
    return "-DREGATTA_LAST_ISA_ALONE" if has_it else ""
