"""Shares of limits that move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predict.bench import kernels, operators
from predict.bench.ceilings import LEAST_BYTES, Limits, _passes, measure_tiles, share_text
from predict.device.library import Library
from tests.support.cpu_kernels import refusal


class Machine:
    """A host whose bandwidth is another one at each measurement."""

    def __init__(self, *gbs: float) -> None:
        self.gbs = list(gbs)
        self.sizes: list[int] = []

    def __call__(self, dtype: str, buffer: Any) -> dict[str, float]:
        self.sizes.append(buffer.nbytes)
        return {"read_bytes_per_s": self.gbs.pop(0) * 1e9, "flops_per_s": 1e12}


def test_work_is_held_against_what_was_measured_beside_it() -> None:
    limits = Limits("float32", 1e9, np.ones(1 << 20, np.float32), Machine(80.0, 40.0, 20.0))
    for _ in range(3):
        limits.sample()
    assert limits.beside["read_bytes_per_s"] == 30e9
    assert limits.mean["read_bytes_per_s"] == pytest.approx(140e9 / 3)
    assert limits.spread == 4.0


@pytest.mark.parametrize(
    ("working", "read"), [(10, LEAST_BYTES), (6 << 20, 6 << 20), (1 << 40, 16 << 20)]
)
def test_the_limit_reads_as_many_bytes_as_the_work(working: float, read: int) -> None:
    machine = Machine(50.0)
    Limits("float32", working, np.ones(4 << 20, np.float32), machine).sample()
    assert machine.sizes == [read]


def test_short_passes_go_round_the_whole_buffer() -> None:
    passes = _passes(1000, 256 << 20)
    assert len(passes) == 3 * 16
    assert sum(size for _, size in passes[:16]) == 256 << 20
    assert len({address for address, _ in passes}) == 16
    assert _passes(0, LEAST_BYTES) == [(0, LEAST_BYTES)] * 24


def test_more_than_the_whole_is_not_shown_as_a_share() -> None:
    assert share_text(0.876) == "88%"
    assert share_text(0.876, digits=1) == "87.6%"
    assert share_text(1.02) == "102%"
    assert share_text(1.6) == ">limit"


def test_a_case_is_measured_in_slices_between_limits(
    compiled: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(*range(10, 20))
    monkeypatch.setattr(
        kernels, "Limits", lambda dtype, size, buffer: Limits(dtype, size, buffer, machine)
    )
    shape = operators.ModelShape(64, 96, 4, 2, 32, 128)
    sizes = operators.Sizes(shape, 2, 100, "float32")
    (case,) = operators.CASES["norm"](sizes)
    buffer = np.ones(LEAST_BYTES // 4, np.float32)
    row = kernels.run_case(compiled, case, sizes, 0.01, buffer)
    assert len(machine.sizes) == kernels.SLICES + 1
    assert row["values"]["measured_bandwidth_spread"] == pytest.approx(13 / 10)
    assert row["limit"] == "bandwidth"
    spread = row["spread"]["time_us"]
    assert spread["q1"] <= row["values"]["time_us"] <= spread["q3"]
    assert kernels.line_of(row).startswith("norm, 64, 2 tokens")


def test_calls_rotate_over_the_copies_from_slice_to_slice() -> None:
    called: list[int] = []
    taken = kernels.times(called.append, 5, 0.0, first=4)
    assert (called, len(taken)) == ([3, 2, 1, 4, 0], 2)


def test_tiles_do_most_with_factors_in_registers(compiled: Library) -> None:
    rates = measure_tiles(np.ones(1 << 22, np.float32))
    assert bool(rates) == (not refusal(compiled, "linear", "amx"))
    if rates:
        assert rates["registers"] > rates["memory"] > 0
