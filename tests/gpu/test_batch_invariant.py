"""With batch_invariant: a row's bits, whatever is computed beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams
from predict.config.cache import CACHE_TYPES
from predict.device import devices, library
from predict.nn.blocks import Linear
from predict.ops import compiled as ops
from predict.schemes import scheme_of
from tests.support.batch_invariance import WAYS, answers, check_ways
from tests.support.gpu_products import skip_unless_here
from tests.support.schemes import normal

SETTINGS: dict[str, Any] = {"device": "gpu", "batch_invariant": True, "dtype": "bfloat16"}
SCHEMES = ("weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8", "w4a8")
SHAPES = Path(__file__).resolve().parents[2] / "examples" / "shapes"


@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_ways_with_schemes(gpu: devices.Device, demo_with_scales: Path, scheme: str | None) -> None:
    skip_unless_here(scheme)
    check_ways(demo_with_scales, {**SETTINGS, "quant_type": scheme}, 12)


@pytest.mark.parametrize("cache_type", CACHE_TYPES)
def test_ways_with_caches(gpu: devices.Device, demo_with_scales: Path, cache_type: str) -> None:
    check_ways(demo_with_scales, {**SETTINGS, "cachekv_int8_type": cache_type}, 12)


def test_float16_and_static_mode(
    gpu: devices.Device, demo_with_scales: Path, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "dtype": "float16"}
    check_ways(demo_with_scales, settings, 12)
    config = EngineConfig(
        model_name_or_path=str(demo_with_scales),
        inference_model=True,
        attention="append",
        max_length=256,
        batch_size=12,
        **settings,
    )
    export_model(config, tmp_path)
    wanted = answers(demo_with_scales, {**settings, **WAYS["alone"]}, 12)
    assert answers(tmp_path, {**settings, **WAYS["together"], "mode": "static"}, 12) == wanted


def dummy(scheme: str | None, cache_type: str | None, **changes: Any) -> list[list[float]]:
    """Logprobs of a model of 16 layers with random weights, of one request first in its batch."""
    config = EngineConfig(
        model_name_or_path=str(SHAPES / "llama-3.2-1b"),
        load_format="dummy",
        inference_model=True,
        attention="append",
        prefix_caching=False,
        max_length=1024,
        quant_type=scheme,
        weightonly_group_size=128 if scheme in ("weight_only_int4", "w4a8") else -1,
        cachekv_int8_type=cache_type,
        num_cache_blocks=256,
        **SETTINGS,
        **changes,
    )
    llm = LLM(config)
    draws = np.random.default_rng(3)
    lengths = [700, *draws.integers(5, 200, 39)]
    prompts = [draws.integers(0, 128_000, length).tolist() for length in lengths]
    params = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True, logprobs=2)
    output = llm.generate(prompts[: config.scheduling.batch_size], params)[0].outputs[0]
    assert output.logprobs is not None
    return [[float(token), *(one.logprob for one in place.values())]
            for token, place in zip(output.token_ids, output.logprobs, strict=True)]  # fmt: skip


@pytest.mark.parametrize(
    ("scheme", "cache_type"),
    [(None, None), *((scheme, None) for scheme in SCHEMES), ("a8w8_fp8", "fp8"), (None, "int4")],
)
def test_large_model(gpu: devices.Device, scheme: str | None, cache_type: str | None) -> None:
    skip_unless_here(scheme)
    alone = dummy(scheme, cache_type, batch_size=1)
    assert dummy(scheme, cache_type, batch_size=40) == alone
    assert dummy(scheme, cache_type, batch_size=9, max_num_batched_tokens=96) == alone


@pytest.fixture
def batch_invariant(gpu: devices.Device) -> Iterator[devices.Device]:
    with library.require().batch_invariant():
        yield gpu


@pytest.mark.parametrize("kernels", ["", "linear=mma"])
@pytest.mark.parametrize("scheme", ["dense", *SCHEMES])
@pytest.mark.parametrize(("columns", "rows"), [(4096, 1024), (1024, 6144), (8192, 512)])
def test_products(
    batch_invariant: devices.Device,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    rows: int,
    scheme: str,
    kernels: str,
) -> None:
    import paddle

    if kernels and scheme in ("dense", "w4a8"):
        pytest.skip("has no kernels for every GPU")
    monkeypatch.setenv("REGATTA_KERNEL", kernels)
    weight = normal((rows, columns))
    if scheme == "dense":
        tensors: tuple[Any, ...] = (paddle.to_tensor(weight).astype("bfloat16"),)
    else:
        skip_unless_here(scheme)
        module = scheme_of(scheme)
        quantized = module.quantize(weight, 128 if "4" in scheme else -1)
        tensors = module.tensors(quantized, "bfloat16", compiled=ops, place=batch_invariant.place())
    linear = Linear(scheme, tensors, None, columns, rows)
    x = paddle.to_tensor(normal((700, columns), seed=5)).astype("bfloat16")
    wanted = ops.linear(x, linear).astype("float32").numpy()
    assert np.isfinite(wanted).all()
    for first, count in [(0, 1), (3, 2), (699, 1), (5, 8), (8, 9), (60, 16), (31, 17), (1, 33),
                         (64, 64), (63, 65), (100, 128), (7, 129), (300, 257)]:  # fmt: skip
        got = ops.linear(x[first : first + count], linear).astype("float32").numpy()
        np.testing.assert_array_equal(got, wanted[first : first + count], str((first, count)))
