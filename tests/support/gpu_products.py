"""Which schemes run on this machine's GPU, and products in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from predict import EngineConfig
from predict.config.quantization import QuantSettings
from predict.config.schemes import scheme_info
from predict.device import devices
from predict.schemes import Quantized, scheme_of
from tests.support.schemes import SETTINGS, normal, relative_error

# Activations in 16 bits over two layers.
DISTANCE = {"bfloat16": 0.06, "float16": 0.05}


# Of a product: root mean square, of the output's. Outputs in 16 bits, a code that tips over on a
# boundary, and of e4m3 the hardware's 14 bits of a sum (0.0013 and 0.0029 of it with 4,096 and
# 14,336 columns). Scales of groups are rounded to 16 bits, and codes times
# scales: in bfloat16 some 0.0016 each, beside the output's own.
PRODUCT_DISTANCE = {"bfloat16": 5e-3, "float16": 4e-3}
PRODUCT_ROWS = (1, 2, 13, 17, 64, 128, 300)


def runs_here(*schemes: str | None) -> bool:
    """Whether this GPU has all of the schemes."""
    try:
        capability = devices.driver_info().gpus[0].capability
    except (IndexError, ValueError):
        return False
    since = [scheme_info(scheme).support.gpu for scheme in schemes if scheme is not None]
    return all(first is not None and first <= capability for first in since)


def skip_unless_here(*schemes: str | None) -> None:
    if not runs_here(*schemes):
        pytest.skip("predict.config.schemes.SCHEMES: not on this GPU")


def settings_here(name: str) -> tuple[dict[str, Any], QuantSettings]:
    """A row of schemes.SETTINGS, with groups of a size that the GPU's kernels have, and what it
    asks for; skips the test where this GPU has not its schemes.
    """
    settings: dict[str, Any] = dict(SETTINGS[name])
    if "weightonly_group_size" in settings:
        settings["weightonly_group_size"] = 64
    asked = EngineConfig(model_name_or_path="x", **settings).quantization.settings
    skip_unless_here(asked.scheme, asked.head_scheme)
    return settings, asked


def skip_unless_product(scheme: str, group_size: int) -> None:
    """Skips the test where this GPU has no product of the scheme in such groups."""
    skip_unless_here(scheme)
    if group_size not in scheme_info(scheme).support.hopper_groups:
        pytest.skip("predict.config.schemes.SCHEMES: not on GPUs")


def check_products(
    gpu: devices.Device,
    scheme: str,
    weight: Quantized,
    dtype: str,
    row_counts: Sequence[int] = PRODUCT_ROWS,
) -> None:
    """Asserts that its products with x of so many rows are plain Paddle's with the same x."""
    import paddle
    from predict.nn.blocks import Linear
    from predict.ops import compiled as ops

    module = scheme_of(scheme)
    num_rows, num_columns = weight.codes.shape
    paddle.set_device("cpu")
    plain = module.tensors(weight, "float32", compiled=None)
    rows = [normal((n, num_columns), seed=n) for n in row_counts]
    inputs = [paddle.to_tensor(x).astype(dtype).astype("float32").numpy() for x in rows]
    wanted = [module.product(paddle.to_tensor(x), plain).numpy() for x in inputs]
    devices.activate(gpu)
    made = module.tensors(weight, dtype, compiled=ops, place=gpu.place())
    linear = Linear(scheme, made, None, num_columns, num_rows)
    for x, want in zip(inputs, wanted, strict=True):
        got = ops.linear(paddle.to_tensor(x).astype(dtype), linear).astype("float32").numpy()
        assert relative_error(got, want) < PRODUCT_DISTANCE[dtype], len(x)
