"""The C++ code under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.

The operators are tested by some of their own tests (tests/support/sanitized.py) with the library
that `python csrc/setup_cpu.py install --sanitize NAME` makes; that takes minutes. No work is shared
here, for the builds to run in one process each: what the tests of one share is in test_thread_pool.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

import build
from predict.device import library
from tests.support import checkout
from tests.support.paths import ROOT
from tests.support.sanitized import covering
from tests.support.sanitizers import environment, last_isa_alone, two_isas

REPORTS = ("ERROR: AddressSanitizer", "runtime error:", "DEADLYSIGNAL")


def own_races(output: str) -> list[str]:
    """The reports of ThreadSanitizer whose two accesses are both the library's.

    It cannot see how Paddle orders its threads: that one of them frees what a kernel wrote, after
    the kernel is done, looks like a race.
    """
    reports = re.findall(r"WARNING: ThreadSanitizer: .*?SUMMARY: [^\n]*", output, re.DOTALL)
    return [report for report in reports if all(map(is_own, accesses(report)))]


def accesses(report: str) -> list[str]:
    """The stacks of a report's reads and writes."""
    return [part for part in report.split("\n\n") if re.search("(?i)(read|write) of size", part)]


def is_own(stack: str) -> bool:
    """Whether the library made the access, itself or through what the runtime stands in for."""
    frames = [frame for frame in re.findall(r"#\d+ [^\n]*", stack) if "libtsan" not in frame]
    return bool(frames) and "libregatta" in frames[0]


RACE = """
WARNING: ThreadSanitizer: data race (pid=1)
  Write of size 8 at 0x7b8 by thread T12:
    #0 memset ../sanitizer_common_interceptors.inc:799 (libtsan.so+0x5cbc4)
    #1 {0} <null> ({0}+0x22b97e0)

  Previous write of size 8 at 0x7b8 by main thread:
    #0 {1} <null> ({1}+0x22b97e0)
    #1 Compute op_meta_info.h:406 (libregatta_cpu.so+0x4afe24)

SUMMARY: ThreadSanitizer: data race in {0}
"""


def test_every_two_values_meet_in_the_combinations_that_run() -> None:
    sizes = {"candidate": 4, "dtype": 3, "shape": 10, "scheme": 5}
    rows = [
        dict(zip(sizes, map(str, values), strict=True))
        for values in itertools.product(*map(range, sizes.values()))
    ]
    chosen = [rows[index] for index in covering(rows)]
    assert len(chosen) < len(rows) / 8
    for left, right in itertools.combinations(sizes, 2):
        assert len({(row[left], row[right]) for row in chosen}) == sizes[left] * sizes[right]
    single = [rows[index] for index in covering(rows, 1)]
    assert len(single) == max(sizes.values())
    assert all(len({row[name] for row in single}) == size for name, size in sizes.items())
    assert covering([{"shape": "1"}, {"shape": "2"}, {"shape": "1"}]) == [0, 1]
    assert covering([{}]) == [0]
    assert not covering([])


def test_race_is_the_librarys_where_both_accesses_are() -> None:
    own, other = "libregatta_cpu.so", "libphi_core.so"
    assert len(own_races(RACE.format(own, own) * 2)) == 2
    assert not own_races(RACE.format(own, other) + RACE.format(other, own))
    assert not own_races(RACE.format(other, other))


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", [("address", "undefined"), ("thread",)], ids="-".join)
def test_operators_pass_their_tests_under(
    sanitizers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = environment(sanitizers)
    # What the tests run on: compiling is half of the time.
    monkeypatch.setenv("CXXFLAGS", last_isa_alone() if "thread" in sanitizers else two_isas())
    result = build.build_cpu_library(sanitizers=sanitizers)
    process = subprocess.run(
        [*build.sanitized_pytest(sanitizers), "-x", "-s", *build.SANITIZED_TESTS.split()],
        cwd=ROOT,
        env={**os.environ, **variables, "REGATTA_LIBRARY": str(result.library)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stdout[-8000:]
    assert not [report for report in REPORTS if report in process.stdout]
    assert not own_races(process.stdout)
    assert " passed" in process.stdout


OVERFLOW = """
#include "paddle/phi/api/ext/op_meta_info.h"
std::vector<paddle::Tensor> Beyond(const paddle::Tensor& x) {
  volatile float beyond = x.data<float>()[x.numel()];
  return {beyond == 0 ? x : x};
}
PD_BUILD_OP(build_test_beyond).Inputs({"x"}).Outputs({"y"}).SetKernelFn(PD_KERNEL(Beyond));
"""


@pytest.mark.slow
def test_read_beyond_a_tensor_is_reported_and_the_good_library_stays(tmp_path: Path) -> None:
    variables = environment(["address"])
    root = checkout.make(tmp_path)
    (root / "csrc/paddle/beyond.cc").write_text(OVERFLOW)
    good = root / "predict/lib" / library.LIBRARY_NAME
    good.parent.mkdir()
    good.write_text("the good one")
    built = checkout.run(root, "csrc/setup_cpu.py", "install", "--sanitize", "address")
    assert built.returncode == 0, built.stdout
    assert good.read_text() == "the good one"
    assert "LD_PRELOAD=" in built.stdout
    program = (
        "from predict.device import library\n"
        "paddle = library.import_paddle()\n"
        "library.require().op('build_test_beyond')(paddle.ones([1000]))\n"
    )
    path = good.parent / "sanitize-address" / good.name
    process = checkout.run(root, "-c", program, **variables, REGATTA_LIBRARY=str(path))
    assert process.returncode != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in process.stdout


@pytest.mark.parametrize(
    ("sanitizers", "message"),
    [
        (["leak"], r"--sanitize leak is not known \(allowed: address, undefined, thread\)"),
        (["thread", "address"], "thread goes with no other"),
    ],
)
def test_sanitizers_that_cannot_be_had_are_named(sanitizers: list[str], message: str) -> None:
    with pytest.raises(build.BuildError, match=message):
        build.sanitizer_flags(sanitizers)


def test_compiler_without_the_runtime_is_named(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho libasan.so\n")  # what gcc prints for a file it has not
    compiler.chmod(0o755)
    with pytest.raises(build.BuildError, match=r"has no libasan\.so, which --sanitize address"):
        build.sanitizer_environment(str(compiler), build.find_paddle(), ["address"])


def test_rebuilding_a_sanitized_library_is_another_command() -> None:
    path = library.LIBRARY_DIR / "sanitize-address-undefined" / library.LIBRARY_NAME
    assert library.build_command(path).endswith("install --sanitize address,undefined")
    assert library.build_command(library.LIBRARY_DIR / library.LIBRARY_NAME).endswith("install")
