"""Quantized models on the GPU: near plain Paddle's, and static as dynamic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import EngineConfig
from predict.config.schemes import scheme_info
from predict.device import devices
from predict.errors import UserError
from predict.schemes import scheme_of
from tests.support import tiny
from tests.support.gpu_engines import SETTINGS as GPU_SETTINGS
from tests.support.gpu_products import (
    DISTANCE,
    PRODUCT_DISTANCE,
    check_products,
    settings_here,
    skip_unless_here,
    skip_unless_product,
)
from tests.support.layouts import CASES, GOLDEN, SCHEMES, open_layout
from tests.support.schemes import SETTINGS, answer, logits_of, normal, relative_error

# Features in multiples of 128, which every scheme's blocks and groups divide.
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
# With 8-bit activations, the 16 bits tip codes over, and behind a layer or two other codes have
# tipped over than in float32: plain Paddle's own logits in float16 are 0.17 (fp8) and 0.04 (int8)
# from those in float32. So far can two roundings of the same activations be apart: as far as the
# rounding is from none, each having its share of that, give or take. The products themselves are
# compared with the same x below.
CODES = ("a8w8", "a8w8_fp8", "w4a8")
CODES_SHARE = 1.4


def multiplied_here(name: str) -> dict[str, Any]:
    """The settings; skips the test where this GPU has no product of theirs."""
    settings, asked = settings_here(name)
    if asked.scheme is not None:
        size = asked.block_size if asked.scheme == "a8w8_fp8" else asked.group_size
        skip_unless_product(asked.scheme, size)
    return settings


@pytest.mark.parametrize("dtype", list(DISTANCE))
@pytest.mark.parametrize("name", list(SETTINGS))
def test_logits_are_near_those_of_plain_paddle(
    gpu: devices.Device, tmp_path: Path, name: str, dtype: str
) -> None:
    settings = multiplied_here(name)
    source = tiny.write(tmp_path, SHAPE)
    got = logits_of(source, dtype=dtype, **GPU_SETTINGS, **settings)
    want = logits_of(source, **settings)
    scheme = EngineConfig(model_name_or_path="x", **settings).quantization.settings.scheme
    bound = DISTANCE[dtype]
    if scheme in CODES:
        bound = max(bound, CODES_SHARE * relative_error(want, logits_of(source)))
    assert relative_error(got, want) < bound


@pytest.mark.parametrize("dtype", list(PRODUCT_DISTANCE))
@pytest.mark.parametrize(
    ("scheme", "group_size"), [("a8w8", -1), ("a8w8_fp8", -1), ("a8w8_fp8", 128)]
)
# 0.03 would put 3.0 on the border of two codes, where dividing and multiplying by 1 / 0.03 differ.
@pytest.mark.parametrize("act_scale", [None, 0.0317])
def test_products_of_codes_are_those_of_plain_paddle(
    gpu: devices.Device, scheme: str, group_size: int, act_scale: float | None, dtype: str
) -> None:
    skip_unless_product(scheme, group_size)
    weight = scheme_of(scheme).quantize(normal((272, 400)), group_size)
    check_products(gpu, scheme, replace(weight, act_scale=act_scale), dtype)


@pytest.mark.parametrize("dtype", list(PRODUCT_DISTANCE))
def test_rows_beyond_a_limit_saturate_as_in_plain_paddle(gpu: devices.Device, dtype: str) -> None:
    skip_unless_product("a8w8_fp8", -1)
    weight = scheme_of("a8w8_fp8").quantize(normal((272, 400)), -1)
    check_products(gpu, "a8w8_fp8", replace(weight, act_limit=1.7), dtype)


@pytest.mark.parametrize("dtype", list(PRODUCT_DISTANCE))
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size", [-1, 32, 64, 128])
@pytest.mark.parametrize("scheme", ["weight_only_int8", "weight_only_int4", "w4a8"])
def test_products_of_groups_are_those_of_plain_paddle(
    gpu: devices.Device, scheme: str, group_size: int, zeros: bool, ordered: bool, dtype: str
) -> None:
    skip_unless_product(scheme, group_size)
    draws = np.random.default_rng(7)
    weight = scheme_of(scheme).quantize(normal((272, 384)), group_size)
    if zeros:
        limits = (-128, 129) if scheme == "weight_only_int8" else (0, 17)
        groups = 1 if group_size == -1 else 384 // group_size
        zero = draws.integers(*limits, (272, groups)).astype(np.float32)
        weight = replace(weight, zero=zero, scale=weight.scale.reshape(272, groups))
    if ordered:
        weight = replace(weight, perm=draws.permutation(384).astype(np.int32))
    check_products(gpu, scheme, weight, dtype)


@pytest.mark.parametrize("name", list(SETTINGS))
def test_exported_programs_give_the_same_tokens(
    gpu: devices.Device, tmp_path: Path, name: str
) -> None:
    settings = {**multiplied_here(name), **GPU_SETTINGS, "dtype": "bfloat16"}
    source, out = tiny.write(tmp_path / "source", SHAPE), tmp_path / "out"
    config = EngineConfig(model_name_or_path=str(source), max_length=64, batch_size=2, **settings)
    export_model(config, out)
    assert answer(out, mode="static", **settings) == answer(source, **settings)


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_other_libraries_run(gpu: devices.Device, case: str) -> None:
    skip_unless_here(SCHEMES[case])
    layout, plan = open_layout(GOLDEN / case)
    sizes = scheme_info(SCHEMES[case]).support.hopper_groups
    if any(layout.group_size(linear) not in sizes for linear in plan.linears()):
        with pytest.raises(UserError, match="does not run on sm_"):
            logits_of(GOLDEN / case, dtype="bfloat16", **GPU_SETTINGS)
        return
    got = logits_of(GOLDEN / case, dtype="bfloat16", **GPU_SETTINGS)
    want = logits_of(GOLDEN / case)
    bound = DISTANCE["bfloat16"]
    if SCHEMES[case] in CODES:  # plain Paddle's own distance in 16 bits
        bound = max(
            bound, CODES_SHARE * relative_error(logits_of(GOLDEN / case, dtype="bfloat16"), want)
        )
    assert relative_error(got, want) < bound
