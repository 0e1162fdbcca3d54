"""The thread pool under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer.

A program of its own (native/thread_pool_test.cc): it compiles in seconds.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

import build
from tests.support.paths import ROOT
from tests.support.sanitizers import environment, last_isa_alone

POOL_TEST = ROOT / "tests" / "native" / "thread_pool_test.cc"
POOL_SOURCES = (
    *("thread_pool", "dispatch", "features_x86", "features_arm", "cpu_info", "activate", "norm"),
)


def compile_pool_test(target: Path, sanitizers: Sequence[str]) -> Path:
    """Compiles the thread pool's test with `sanitizers`; returns the program."""
    environment(sanitizers)
    sources = [POOL_TEST, *(build.CSRC / "cpu" / f"{name}.cc" for name in POOL_SOURCES)]
    flags = [flag for flag in build.CXX_FLAGS if flag not in ("-O3", "-fPIC")]
    flags += last_isa_alone().split()  # the pool is the same for all
    flags += [*build.sanitizer_flags(sanitizers), f"-I{build.CSRC / 'include'}", f"-I{build.CSRC}"]
    subprocess.run([build.find_compiler(), *flags, *map(str, sources), "-o", target], check=True)
    return target


def run_pool_test(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    none = "allocator_may_return_null=1"  # as other allocators do
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "ASAN_OPTIONS": none, "TSAN_OPTIONS": none},
    )


@pytest.fixture(scope="module")
def thread_pool_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_pool_test(tmp_path_factory.mktemp("native") / "thread_pool_test", ["thread"])


def test_thread_pool_has_no_races(thread_pool_test: Path) -> None:
    process = run_pool_test(thread_pool_test)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count(": ok") == 8


def test_broken_rule_of_the_thread_pool_is_reported_as_a_race(thread_pool_test: Path) -> None:
    process = run_pool_test(thread_pool_test, "race")
    assert process.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in process.stderr


@pytest.mark.slow
def test_thread_pool_and_its_forks_keep_to_their_memory(tmp_path: Path) -> None:
    program = compile_pool_test(tmp_path / "thread_pool_test", ["address", "undefined"])
    process = run_pool_test(program)
    assert process.returncode == 0, process.stderr
    assert process.stdout.count(": ok") == 9
