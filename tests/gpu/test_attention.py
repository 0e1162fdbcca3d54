"""Attention over a paged cache on the GPU, and what writes it: each format against its plain twin.

Slots of the cache that no token of a request has written hold NaN, or any codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from predict.device import devices
from predict.nn.blocks import Positions
from predict.nn.cache_formats import DENSE, FORMATS, KvFormat, kv_format_of
from predict.ops import compiled as ops
from predict.ops import plain as reference
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
    compare,
    compare_heads,
    decode_spans,
    flat,
    numpy_of,
    prefill_spans,
)

# Quantized caches are of 16 bits in most models.
STORED = [
    (row.name, dtype) for row in FORMATS for dtype in DTYPES if row is DENSE or dtype != "float32"
]


@pytest.fixture(params=[row.name for row in FORMATS])
def kv_format(request: pytest.FixtureRequest, gpu: devices.Device) -> KvFormat:
    row = kv_format_of(request.param, FORMATS)
    if devices.driver_info().gpus[gpu.index].capability < row.gpu:
        pytest.skip("predict.nn.cache_formats.FORMATS: not on this GPU")
    return row


def caches_of(step: Step, kv_format: KvFormat) -> tuple[Any, Any]:
    """A step's pools in the format, with scales per head that clip a few values: on the CPU, the
    GPU.

    What nobody wrote holds any code, and scales that would spread.
    """
    import paddle

    if kv_format is DENSE:
        return step.caches()
    operands = step.operands
    codes, scales = [], []
    with operands.on_cpu():
        for pool in step.pools:
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


def check(
    gpu: devices.Device,
    dtype: str,
    heads: Heads,
    block_size: int,
    spans: list[Span],
    kv_format: KvFormat = DENSE,
    prefix_lens: Sequence[int] = (),
) -> None:
    """Asserts that a step's attention is the plain twin's, and 0 in its three padding rows."""
    operands = Operands(gpu, dtype, seed=heads.head_dim)
    step = Step(operands, spans, heads, block_size, 3, True, prefix_lens)
    attention = attention_weights(operands, heads)
    block = dataclasses.replace(attention.block, prefix_mask=bool(prefix_lens))
    attention = dataclasses.replace(attention, block=block, kv_format=kv_format.name)
    q = operands.tensor(step.num_tokens, heads.size)
    caches, device_caches = caches_of(step, kv_format)
    weights = operands.on_gpu(attention)
    got = ops.paged_attention(q.device, weights, device_caches, step.device).cpu()
    with operands.on_cpu():
        wanted = reference.paged_attention(q.plain, attention, caches, step.plain)
    used = step.num_tokens - 3
    # Keys that were codes become 16-bit numbers, and so do values: two roundings more.
    roundings = 2 if kv_format is DENSE else 4
    compare_heads(got[:used], wanted, heads, dtype, roundings)
    assert (numpy_of(got[used:]) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_attention_equals_its_plain_twin(
    gpu: devices.Device, kv_format: KvFormat, dtype: str, block_size: int, head_dim: int
) -> None:
    heads = Heads(*HEADS[(head_dim // 16 + block_size // 16) % len(HEADS)], head_dim)
    check(gpu, dtype, heads, block_size, decode_spans(block_size), kv_format)
    check(gpu, dtype, heads, block_size, prefill_spans(block_size), kv_format)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", HEADS)
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_attention_weights_any_group(
    gpu: devices.Device, dtype: str, head_dim: int, group: tuple[int, int], make: Any
) -> None:
    check(gpu, dtype, Heads(*group, head_dim), 64, make(64))


@pytest.mark.parametrize(("kv_format", "dtype"), STORED, indirect=["kv_format"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [1, 40, 1500])
def test_windowed_attention(
    gpu: devices.Device, kv_format: KvFormat, dtype: str, head_dim: int, window: int
) -> None:
    heads = Heads(8, 2, head_dim, window)
    check(gpu, dtype, heads, 32, decode_spans(32), kv_format)
    check(gpu, dtype, heads, 32, prefill_spans(32), kv_format)


@pytest.mark.parametrize(("kv_format", "dtype"), STORED, indirect=["kv_format"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [-1, 40])
def test_attention_with_sinks(
    gpu: devices.Device, kv_format: KvFormat, dtype: str, head_dim: int, window: int
) -> None:
    for group in [(1, 1), (8, 2), (64, 8)] if kv_format is DENSE else [(8, 2)]:
        heads = Heads(*group, head_dim, window, sinks=True)
        check(gpu, dtype, heads, 32, decode_spans(32), kv_format)
        check(gpu, dtype, heads, 32, prefill_spans(32), kv_format)
    heads = Heads(8, 2, head_dim, window, sinks=True)
    few = [Span(32_767, 1), Span(9, 1), Span(20_000, 3)]
    check(gpu, dtype, heads, 64, few, kv_format)
    check(gpu, dtype, heads, 64, [Span(11_000, 70)], kv_format)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group", [(4, 4), (8, 2)])
@pytest.mark.parametrize("window", [-1, 1, 40, 257])
def test_attention_behind_a_prefix_mask(
    gpu: devices.Device, dtype: str, head_dim: int, group: tuple[int, int], window: int
) -> None:
    heads = Heads(*group, head_dim, window)
    prompts = {300: 299, 2: 1, 129: 64, 1: 1, 700: 513, 17: 17, 40: 0}
    mixed = [Span(90, 1), *(Span(0, count) for count in prompts), Span(20, 5), Span(7, 0)]
    prefixes = [60, *prompts.values(), 20, 7]
    check(gpu, dtype, heads, 32, mixed, prefix_lens=prefixes)
    check(gpu, dtype, heads, 32, mixed[:1] * 3, prefix_lens=[60, 1, 91])
    check(gpu, dtype, heads, 64, [Span(0, 9)], prefix_lens=[8])


@pytest.mark.parametrize(("kv_format", "dtype"), STORED, indirect=["kv_format"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_contexts(gpu: devices.Device, kv_format: KvFormat, dtype: str, head_dim: int) -> None:
    decode = [Span(32_767, 1), Span(32_768, 1), Span(9, 1), Span(20_000, 3), Span(4093, 17)]
    check(gpu, dtype, Heads(4, 1, head_dim), 64, decode, kv_format)
    for span in (Span(0, 4096), Span(31_000, 70)) if kv_format is DENSE else ():
        check(gpu, dtype, Heads(2, 1, head_dim), 64, [span])


def written(step: Step, heads: Heads, attention: Any, caches: tuple[Any, Any]) -> tuple[Any, Any]:
    """The queries and caches behind a step's write: the GPU's, and those of the plain twin."""
    operands = step.operands
    qkv, rope = operands.tensor(step.num_tokens, heads.qkv_size), operands.ropes(heads)
    weights = operands.on_gpu(attention)
    got = ops.rope_and_cache_write(qkv.device, weights, caches[1], rope.device, step.device)
    with operands.on_cpu():
        return got, reference.rope_and_cache_write(
            qkv.plain, attention, caches[0], rope.plain, step.plain
        )


def assert_codes_are_near(step: Step, kv_format: KvFormat, got: Any, wanted: Any) -> None:
    """Of the step's own rows: a value beside the middle of two codes may fall to either, seldom."""
    import paddle

    block_size, head_dim = step.pools[0].shape[2:]
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
        size = np.abs(rows[1]).max()
        step_size = size / (448 / 32 if kv_format.name == "fp8" else 7)
        assert np.abs(rows[0] - rows[1]).max() <= step_size
        assert np.mean(np.abs(rows[0] - rows[1]) > 2e-3 * size) < 0.02


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(
    ("kv_format", "qk_norm"),
    [("dense", False), *((row.name, True) for row in FORMATS)],
    indirect=["kv_format"],
)
def test_rows_are_rotated_and_written(
    gpu: devices.Device,
    kv_format: KvFormat,
    dtype: str,
    block_size: int,
    head_dim: int,
    qk_norm: bool,
) -> None:
    operands = Operands(gpu, dtype, seed=head_dim)
    for group, rotary_dim in zip(((1, 1), (8, 2), (14, 2)), (None, head_dim // 2, 6), strict=True):
        heads = Heads(*group, head_dim, rotary_dim=rotary_dim)
        attention = attention_weights(operands, heads, qk_norm)
        attention = dataclasses.replace(attention, kv_format=kv_format.name)
        spans = [Span(0, block_size), Span(block_size - 1, 2), Span(2000, 1), Span(3, 0)]
        step = Step(operands, spans, heads, block_size, num_padding=2)
        caches = caches_of(step, kv_format)
        got, wanted = written(step, heads, attention, caches)
        compare(got[0], wanted[0], dtype)
        for given, returned in zip(caches[1], got[1], strict=True):
            assert given.data_ptr() == returned.data_ptr()
        if kv_format is not DENSE:
            with operands.on_cpu():
                assert_codes_are_near(step, kv_format, got[1], wanted[1])
            continue
        for mine, theirs in zip(got[1], wanted[1], strict=True):
            compare(mine, theirs, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_in_two_dimensions(gpu: devices.Device, dtype: str, head_dim: int) -> None:
    operands, heads = Operands(gpu, dtype), Heads(3, 3, head_dim, rotary_dim=head_dim // 2)
    attention = attention_weights(operands, heads)
    block = dataclasses.replace(attention.block, positions=Positions(two_dimensional=True))
    attention = dataclasses.replace(attention, block=block)
    spans = [Span(0, 600), Span(40, 1), Span(2000, 1)]
    step = Step(operands, spans, heads, 32, num_padding=2, prefix_lens=[500, 30, 1000])
    for mine, theirs in zip(
        *map(flat, written(step, heads, attention, step.caches())), strict=True
    ):
        compare(mine, theirs, dtype)
