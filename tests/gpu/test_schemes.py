"""Quantized models on the GPU: near plain Paddle's, and static as dynamic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import EngineConfig
from predict import device as devices
from predict.errors import UserError
from predict.quantization import GPU_GROUP_SIZES, GROUP_SIZES, SUPPORT
from tests import tiny
from tests.test_formats import CASES, GOLDEN, SCHEMES, open_layout
from tests.test_schemes import SETTINGS, answer, logits_of, relative_error

# Features in multiples of 128, which every scheme's blocks and groups divide.
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
GPU_SETTINGS = {"device": "gpu", "inference_model": True, "attention": "append"}
# Activations in 16 bits over two layers; with int8 or e4m3 activations a code may tip over.
DISTANCE = {"bfloat16": 0.06, "float16": 0.05}


def runs_here(*schemes: str | None) -> bool:
    """Whether this GPU has all of the schemes."""
    try:
        capability = devices.driver_info().gpus[0].capability
    except (IndexError, ValueError):
        return False
    since = [SUPPORT[scheme].gpu for scheme in schemes if scheme is not None]
    return all(first is not None and first <= capability for first in since)


def skip_unless_here(name: str) -> dict[str, Any]:
    """The settings, with groups of a size that the GPU's kernels have."""
    settings = dict(SETTINGS[name])
    if "weightonly_group_size" in settings:
        settings["weightonly_group_size"] = 64
    asked = EngineConfig(model_name_or_path="x", **settings).quantization
    if not runs_here(asked.scheme, asked.head_scheme):
        pytest.skip("predict.quantization.SUPPORT: not on this GPU")
    size = asked.block_size if asked.scheme == "a8w8_fp8" else asked.group_size
    if size not in GPU_GROUP_SIZES.get(str(asked.scheme), GROUP_SIZES):
        pytest.skip("predict.quantization.GPU_GROUP_SIZES: not on GPUs")
    return settings


@pytest.mark.parametrize("dtype", list(DISTANCE))
@pytest.mark.parametrize("name", list(SETTINGS))
def test_logits_are_near_those_of_plain_paddle(
    gpu: devices.Device, tmp_path: Path, name: str, dtype: str
) -> None:
    settings = skip_unless_here(name)
    source = tiny.write(tmp_path, SHAPE)
    got = logits_of(source, dtype=dtype, **GPU_SETTINGS, **settings)
    assert relative_error(got, logits_of(source, **settings)) < DISTANCE[dtype]


@pytest.mark.parametrize("name", list(SETTINGS))
def test_exported_programs_give_the_same_tokens(
    gpu: devices.Device, tmp_path: Path, name: str
) -> None:
    settings = {**skip_unless_here(name), **GPU_SETTINGS, "dtype": "bfloat16"}
    source, out = tiny.write(tmp_path / "source", SHAPE), tmp_path / "out"
    config = EngineConfig(model_name_or_path=str(source), max_length=64, batch_size=2, **settings)
    export_model(config, out)
    assert answer(out, mode="static", **settings) == answer(source, **settings)


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_of_other_libraries_run(gpu: devices.Device, case: str) -> None:
    if not runs_here(SCHEMES[case]):
        pytest.skip("predict.quantization.SUPPORT: not on this GPU")
    layout, plan = open_layout(GOLDEN / case)
    sizes = GPU_GROUP_SIZES.get(SCHEMES[case], GROUP_SIZES)
    if any(layout.group_size(linear) not in sizes for linear in plan.linears()):
        with pytest.raises(UserError, match="does not run on GPUs yet"):
            logits_of(GOLDEN / case, dtype="bfloat16", **GPU_SETTINGS)
        return
    got = logits_of(GOLDEN / case, dtype="bfloat16", **GPU_SETTINGS)
    assert relative_error(got, logits_of(GOLDEN / case)) < DISTANCE["bfloat16"]
