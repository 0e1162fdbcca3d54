"""The kernels that every GPU has (csrc/cuda/gemm_mma.cuh), forced: products near plain Paddle's."""

from __future__ import annotations

import pytest

from predict import device as devices
from predict.schemes import scheme_of
from tests.gpu.test_schemes import PRODUCT_DISTANCE
from tests.test_schemes import normal, relative_error

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
    import paddle
    from predict import ops
    from predict.nn.decoder import Linear

    width = 448 if group_size == 64 else IN
    module = scheme_of(scheme)
    weight = module.quantize(normal((OUT, width)), group_size)
    paddle.set_device("cpu")
    plain = module.tensors(weight, "float32", compiled=False)
    inputs = [
        paddle.to_tensor(normal((rows, width), seed=rows)).astype(dtype).astype("float32").numpy()
        for rows in ROWS
    ]
    wanted = [module.product(paddle.to_tensor(x), plain).numpy() for x in inputs]
    devices.activate(gpu)
    made = module.tensors(weight, dtype, compiled=True, place=gpu.place())
    linear = Linear(scheme, made, None, width, OUT)
    for x, want in zip(inputs, wanted, strict=True):
        got = ops.linear(paddle.to_tensor(x).astype(dtype), linear).astype("float32").numpy()
        assert relative_error(got, want) < PRODUCT_DISTANCE[dtype], len(x)
