"""Quantized caches on the GPU: each format's kernels against its plain twin, and whole answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM
from predict.device import devices
from predict.nn.cache_formats import FORMATS, KvFormat
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.gpu_engines import FORMS, runner_of
from tests.support.gpu_operands import (
    BLOCK_SIZES,
    DTYPES,
    HEAD_DIMS,
    HEADS,
    Heads,
    Operands,
    Span,
    Step,
    attention_weights,
    compare_heads,
    decode_spans,
    numpy_of,
    prefill_spans,
)
from tests.support.gpu_products import DISTANCE
from tests.support.quantized_caches import CACHE_TYPES, PROMPTS, config, greedy, model
from tests.support.schemes import logits_of, relative_error

QUANTIZED = [row for row in FORMATS if row.scales != "none"]
SETTINGS = {"device": "gpu", "attention": "append"}


@pytest.fixture(params=QUANTIZED, ids=lambda row: row.name)
def kv_format(request: pytest.FixtureRequest, gpu: devices.Device) -> KvFormat:
    row: KvFormat = request.param
    if devices.driver_info().gpus[gpu.index].capability < row.gpu:
        pytest.skip("predict.nn.cache_formats.FORMATS: not on this GPU")
    return row


@pytest.fixture(params=CACHE_TYPES)
def cache_type(request: pytest.FixtureRequest, gpu: devices.Device) -> str:
    if request.param == "fp8" and devices.driver_info().gpus[gpu.index].capability < (8, 9):
        pytest.skip("predict.nn.cache_formats.FORMATS: not on this GPU")
    return str(request.param)


def quantized(operands: Operands, kv_format: KvFormat, pools: tuple[Any, ...]) -> tuple[Any, Any]:
    """The pools in the format, with scales per head that clip a few values: on the CPU, the GPU.

    What nobody wrote holds any code, and scales that would spread.
    """
    import paddle

    codes, scales = [], []
    with operands.on_cpu():
        for pool in pools:
            written = ~np.isnan(pool[..., 0])
            given = None
            if kv_format.scales == "head":
                assert kv_format.range_max is not None
                largest = np.linspace(2.0, 3.0, pool.shape[1], dtype=np.float32)
                given = paddle.to_tensor(largest / kv_format.range_max)
            rows = paddle.to_tensor(np.nan_to_num(pool))
            made, scale = kv_format.quantize(rows, None if given is None else given.unsqueeze(-1))
            assert scale is not None
            noise = operands.generator.integers(0, 256, made.shape).astype(np.uint8)
            codes.append(paddle.to_tensor(np.where(written[..., None], made.numpy(), noise)))
            if given is None:
                mask = written.reshape(written.shape + (1,) * (scale.ndim - written.ndim))
                given = paddle.to_tensor(np.where(mask, scale.numpy(), np.float32("nan")))
            scales.append(given)
    plain = (*codes, *scales)
    return plain, tuple(t._copy_to(operands.gpu.place(), True) for t in plain)


def check_attention(
    operands: Operands, kv_format: KvFormat, heads: Heads, block_size: int, spans: list[Span]
) -> None:
    step = Step(operands, spans, heads, block_size, 3, filled=True)
    attention = dataclasses.replace(attention_weights(operands, heads), kv_format=kv_format.name)
    q = operands.tensor(step.num_tokens, heads.size)
    caches, device_caches = quantized(operands, kv_format, step.pools)
    weights = operands.on_gpu(attention)
    got = ops.paged_attention(q.device, weights, device_caches, step.device).cpu()
    with operands.on_cpu():
        wanted = reference.paged_attention(q.plain, attention, caches, step.plain)
    used = step.num_tokens - 3
    # Keys become 16-bit numbers, and so do values: two roundings more than in a dense cache.
    compare_heads(got[:used], wanted, heads, operands.dtype, roundings=4)
    assert (numpy_of(got[used:]) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_reads_what_the_codes_stand_for(
    gpu: devices.Device, kv_format: KvFormat, dtype: str, block_size: int, head_dim: int
) -> None:
    operands = Operands(gpu, dtype, seed=head_dim)
    heads = Heads(*HEADS[(head_dim // 16 + block_size // 16) % len(HEADS)], head_dim)
    check_attention(operands, kv_format, heads, block_size, decode_spans(block_size))
    check_attention(operands, kv_format, heads, block_size, prefill_spans(block_size))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [1, 40, 1500])
def test_windowed_attention(
    gpu: devices.Device, kv_format: KvFormat, dtype: str, head_dim: int, window: int
) -> None:
    operands, heads = Operands(gpu, dtype, seed=head_dim), Heads(8, 2, head_dim, window)
    check_attention(operands, kv_format, heads, 32, decode_spans(32))
    check_attention(operands, kv_format, heads, 32, prefill_spans(32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [-1, 40])
def test_attention_with_sinks(
    gpu: devices.Device, kv_format: KvFormat, dtype: str, head_dim: int, window: int
) -> None:
    operands = Operands(gpu, dtype, seed=head_dim)
    heads = Heads(8, 2, head_dim, window, sinks=True)
    check_attention(operands, kv_format, heads, 32, decode_spans(32))
    check_attention(operands, kv_format, heads, 32, prefill_spans(32))
    check_attention(operands, kv_format, heads, 64, [Span(32_767, 1), Span(9, 1), Span(20_000, 3)])
    check_attention(operands, kv_format, heads, 64, [Span(11_000, 70)])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_contexts(gpu: devices.Device, kv_format: KvFormat, dtype: str, head_dim: int) -> None:
    operands = Operands(gpu, dtype, seed=head_dim)
    spans = [Span(32_767, 1), Span(9, 1), Span(20_000, 3), Span(4093, 17)]
    check_attention(operands, kv_format, Heads(4, 1, head_dim), 64, spans)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_rows_are_quantized_when_they_are_written(
    gpu: devices.Device, kv_format: KvFormat, dtype: str, block_size: int, head_dim: int
) -> None:
    import paddle

    operands = Operands(gpu, dtype, seed=head_dim)
    for (num_heads, num_kv_heads), rotary_dim in zip(
        ((1, 1), (8, 2), (14, 2)), (None, head_dim // 2, 6), strict=True
    ):
        heads = Heads(num_heads, num_kv_heads, head_dim, rotary_dim=rotary_dim)
        plain = attention_weights(operands, heads, True)
        plain = dataclasses.replace(plain, kv_format=kv_format.name)
        spans = [Span(0, block_size), Span(block_size - 1, 2), Span(2000, 1), Span(3, 0)]
        step = Step(operands, spans, heads, block_size, num_padding=2)
        qkv, rope = operands.tensor(step.num_tokens, heads.qkv_size), operands.ropes(heads)
        caches, device_caches = quantized(operands, kv_format, step.pools)
        weights = dataclasses.replace(operands.on_gpu(plain), kv_format=kv_format.name)
        _, got = ops.rope_and_cache_write(
            qkv.device, weights, device_caches, rope.device, step.device
        )
        with operands.on_cpu():
            _, wanted = reference.rope_and_cache_write(
                qkv.plain, plain, caches, rope.plain, step.plain
            )
            slots = step.arrays.slot_mapping[step.arrays.slot_mapping >= 0]
            at = slots // block_size, slice(None), slots % block_size
            for which in range(2):
                codes, unit = wanted[which].numpy()[at], wanted[2 + which]
                mine = got[2 + which].cpu()
                if kv_format.scales == "token":
                    unit, mine = (paddle.to_tensor(t.numpy()[at]) for t in (unit, mine))
                    np.testing.assert_allclose(mine.numpy(), unit.numpy(), rtol=2e-3, atol=2e-3)
                rows = [
                    kv_format.unpack(paddle.to_tensor(x), scale, head_dim).numpy()
                    for x, scale in ((got[which].cpu().numpy()[at], mine), (codes, unit))
                ]
                # A value beside the middle of two codes may fall to either: seldom.
                size = np.abs(rows[1]).max()
                step_size = size / (448 / 32 if kv_format.name == "fp8" else 7)
                assert np.abs(rows[0] - rows[1]).max() <= step_size
                assert np.mean(np.abs(rows[0] - rows[1]) > 2e-3 * size) < 0.02


def agreement(a: list[tuple[int, ...]], b: list[tuple[int, ...]]) -> float:
    pairs = [
        (x, y) for left, right in zip(a, b, strict=True) for x, y in zip(left, right, strict=True)
    ]
    return sum(x == y for x, y in pairs) / len(pairs)


# float32 sums in another order: a code beside the middle of two may fall to the other.
ALIKE = 0.9


@pytest.mark.parametrize("form", FORMS)
def test_text_is_that_of_the_cpu(tmp_path: Path, cache_type: str, form: str) -> None:
    directory = model(tmp_path / "model", {})
    changes = {"cachekv_int8_type": cache_type, "attention": "append", "batch_size": 3}
    cpu = greedy(LLM(config(directory, **changes)))
    llm = FORMS[form](LLM(config(directory, device="gpu", **changes)))
    assert agreement(greedy(llm), cpu) >= ALIKE
    assert bool(runner_of(llm).graphs) == (form != "eager")


# Block style, chunks of prompts, preemption, drafts, and one sequence at a time.
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "alone": {"batch_size": 1},
    "block": {"batch_size": 4, "attention": "block", "block_size": 64},
    "chunks": {"batch_size": 5, "max_num_batched_tokens": 7},
    "preemption": {"batch_size": 5, "num_cache_blocks": 8},
    "drafts": {
        "batch_size": 2,
        "speculate_method": "lookahead",
        "speculate_max_draft_token_num": 4,
    },
}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_batch_composition_changes_no_text(
    tmp_path: Path, cache_type: str, composition: str
) -> None:
    directory = model(tmp_path / "model", {})
    settings: dict[str, Any] = {**SETTINGS, "cachekv_int8_type": cache_type}
    together = greedy(LLM(config(directory, **settings, batch_size=5)))
    llm = LLM(config(directory, **{**settings, **COMPOSITIONS[composition]}))
    assert agreement(greedy(llm), together) >= ALIKE
    assert (llm.stats().num_preemptions > 0) == (composition == "preemption")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_prefix_gives_the_same_text_as_a_computed_one(
    tmp_path: Path, cache_type: str, dtype: str
) -> None:
    directory = model(tmp_path / "model", {})
    llm = LLM(config(directory, cachekv_int8_type=cache_type, dtype=dtype, **SETTINGS))
    computed = greedy(llm, PROMPTS[-1:])
    assert llm.stats().num_prefix_hit_tokens == 0
    cached = greedy(llm, PROMPTS[-1:])
    assert llm.stats().num_prefix_hit_tokens == 32
    # In a step of another length products may be summed in another order.
    assert cached[0][0] == computed[0][0]
    assert dtype != "float32" or agreement(cached, computed) >= ALIKE


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", list(DISTANCE))
def test_logits_are_near_those_of_plain_paddle(
    tmp_path: Path, cache_type: str, dtype: str, head_dim: int
) -> None:
    directory = model(tmp_path / "model", {"head_dim": head_dim})
    changes = {"cachekv_int8_type": cache_type}
    got = logits_of(directory, dtype=dtype, inference_model=True, **SETTINGS, **changes)
    wanted = logits_of(directory, dtype="float32", inference_model=False, **changes)
    # In int4, a code that tips over is a fifteenth of a row's extent.
    assert relative_error(got, wanted) < (0.15 if cache_type == "int4" else DISTANCE[dtype])


@pytest.mark.parametrize("dtype", list(DISTANCE))
def test_half_precision_graphs_equal_eager_steps(
    tmp_path: Path, cache_type: str, dtype: str
) -> None:
    directory = model(tmp_path / "model", {"head_dim": 64})
    changes = {"cachekv_int8_type": cache_type, "dtype": dtype, "batch_size": 3}
    texts = [
        greedy(change(LLM(config(directory, **SETTINGS, **changes)))) for change in FORMS.values()
    ]
    assert texts[0] == texts[1] == texts[2]


def test_exported_program_keeps_its_cache(tmp_path: Path, cache_type: str) -> None:
    directory = model(tmp_path / "model", {"head_dim": 64})
    changes = {"cachekv_int8_type": cache_type, "dtype": "bfloat16", "batch_size": 3, **SETTINGS}
    dynamic = greedy(LLM(config(directory, **changes)))
    export_model(config(directory, **changes), tmp_path / "static")
    assert greedy(LLM(config(tmp_path / "static", mode="static", **changes))) == dynamic
