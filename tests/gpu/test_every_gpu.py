"""Kernels that every GPU has (csrc/cuda/gemm/portable), forced: products near plain Paddle's."""

from __future__ import annotations

import pytest

from predict.device import devices
from predict.schemes import scheme_of
from tests.support.gpu_products import PRODUCT_DISTANCE, check_products
from tests.support.schemes import normal

IN, OUT = 400, 272  # no multiples of a unit, a tile or a pair of 16 rows
ROWS = (1, 2, 8, 17, 33, 64, 128, 200)  # from 257 on a packed weight becomes a matrix


@pytest.fixture(autouse=True)
def forced(gpu: devices.Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGATTA_KERNEL", "linear=mma")


@pytest.mark.parametrize("dtype", list(PRODUCT_DISTANCE))
@pytest.mark.parametrize(
    ("scheme", "group_size"),
    [
        ("weight_only_int8", -1),
        ("weight_only_int4", -1),
        ("weight_only_int4", 64),
        ("a8w8", -1),
        ("a8w8_fp8", -1),
        ("a8w8_fp8", 128),
    ],
)
def test_products_are_those_of_plain_paddle(
    gpu: devices.Device, scheme: str, group_size: int, dtype: str
) -> None:
    capability = devices.driver_info().gpus[gpu.index].capability
    if scheme == "a8w8_fp8" and capability < (8, 9):
        pytest.skip("float8 needs sm_89")
    if dtype == "bfloat16" and capability < (8, 0):
        pytest.skip("bfloat16 needs sm_80")
    width = 448 if group_size == 64 else IN
    weight = scheme_of(scheme).quantize(normal((OUT, width)), group_size)
    check_products(gpu, scheme, weight, dtype, ROWS)
