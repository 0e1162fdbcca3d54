"""Each operator on the GPU against its plain twin in float32, over odd shapes.

Slots of the cache that no token of a request has written hold NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from predict.device import cuda, devices
from predict.engine.gpu_runner import read_table
from predict.engine.logprobs import measure
from predict.loading.build import fold_norms
from predict.nn.blocks import Activation, Norm, NormKind, Positions
from predict.nn.decoder import Attention, Layer, Mlp, NormWeights
from predict.nn.inputs import max_lens_of
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.block_forms import FORMS, blocks_of, layer_of
from tests.support.distributions import LOGITS, NUM_DRAWS, SETTINGS, assert_follows, distribution
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
    numpy_of,
    prefill_spans,
    same,
)
from tests.support.records import head_of
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257)
SHAPES = ((64, 64), (200, 136), (131, 67), (1024, 1536))  # K, N


def attention_part(layer: Layer) -> Attention:
    attention = layer[0]
    assert isinstance(attention, Attention)
    return attention


def test_pack_dense_keeps_the_layout_and_rounds(gpu: devices.Device) -> None:
    values = np.random.default_rng(0).standard_normal((67, 131), np.float32)
    for source in DTYPES:
        operands = Operands(gpu, source)
        weight = operands.both(values)
        for dtype in DTYPES:
            packed = ops.pack_dense(weight.device, dtype)
            same(packed, weight.plain.astype(dtype))
    from predict.device import library

    turned = operands.placed(np.ascontiguousarray(values.T))
    (packed,) = library.require().op("regatta_pack_dense")(turned, False, "float32")
    np.testing.assert_array_equal(packed.numpy(), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear(gpu: devices.Device, dtype: str, num_in: int, num_out: int, bias: bool) -> None:
    operands = Operands(gpu, dtype)
    plain = operands.linear(num_in, num_out, bias)
    weights = operands.on_gpu(plain)
    for rows in ROWS:
        x = operands.tensor(rows, num_in)
        with operands.on_cpu():
            wanted = reference.linear(x.plain, plain)
        compare(ops.linear(x.device, weights), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 131, 896, 4096, 8200])
def test_rms_norm(gpu: devices.Device, dtype: str, width: int) -> None:
    operands = Operands(gpu, dtype)
    weight = operands.tensor(width, around=1.0, scale=0.1)
    for rows in ROWS:
        x, residual = operands.tensor(rows, width), operands.tensor(rows, width)
        for added in (None, residual):
            got = ops.rms_norm(x.device, weight.device, added and added.device, 1e-5)
            # The sum is rounded before the norm, so the norm is compared on the rounded one.
            total = x.plain if added is None else x.plain + added.plain
            with operands.on_cpu():
                total = total.astype(dtype).astype("float32")
                wanted, _ = reference.rms_norm(total, weight.plain, None, 1e-5)
            compare(got[0], wanted, dtype)
            same(got[1].cpu().astype("float32"), total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(("parts", "num_weights", "size"), [(6, 4, 128), (5, 5, 40), (3, 2, 33)])
def test_norms_of_heads(
    gpu: devices.Device, parts: int, num_weights: int, size: int, kind: NormKind, dtype: str
) -> None:
    operands, settings = Operands(gpu, dtype), Norm(kind, 1e-5)
    weight = operands.tensor(num_weights, size, around=1.0, scale=0.1)
    for rows in ROWS:
        x = operands.tensor(rows, parts * size)
        got = ops.norm(x.device, NormWeights(weight.device), settings)
        with operands.on_cpu():
            wanted = reference.norm(x.plain, NormWeights(weight.plain), settings)
        compare(got, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 88, 131, 4864])
def test_silu_mul(gpu: devices.Device, dtype: str, width: int) -> None:
    operands = Operands(gpu, dtype)
    for rows in ROWS:
        x = operands.tensor(rows, 2 * width, scale=3.0)
        with operands.on_cpu():
            wanted = reference.activate(x.plain, Activation())
        compare(ops.activate(x.device, Activation()), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 67])
def test_embedding(gpu: devices.Device, dtype: str, width: int) -> None:
    operands = Operands(gpu, dtype)
    head = operands.linear(width, 50)
    weights = operands.on_gpu(head)
    ids = np.array([0, 49, 7, 7, 23], np.int32)
    wanted = head.tensors[0].numpy()[ids]
    for table in (weights.tensors[0], None):
        got = ops.embedding(operands.placed(ids), table, weights)
        np.testing.assert_array_equal(numpy_of(got), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [128, 1003])
def test_logits(gpu: devices.Device, dtype: str, vocab: int) -> None:
    operands = Operands(gpu, dtype)
    head = operands.linear(136, vocab)
    norm = operands.tensor(136, around=1.0, scale=0.1)
    weights = operands.on_gpu(head)
    for rows in (1, 2, 9, 33, 130):
        hidden = operands.tensor(2 * rows, 136)
        indices = operands.generator.permutation(2 * rows)[:rows].astype(np.int32)
        got = ops.logits(hidden.device, head_of(weights, norm.device), operands.placed(indices))
        with operands.on_cpu():
            import paddle

            wanted = reference.logits(
                hidden.plain, head_of(head, norm.plain), paddle.to_tensor(indices)
            )
        assert str(got.dtype) == "paddle.float32"
        compare(got, wanted, dtype, roundings=2)


def flat(outputs: tuple[Any, list[Any]]) -> list[Any]:
    return [outputs[0], *outputs[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rope_and_cache_write(
    gpu: devices.Device, dtype: str, block_size: int, head_dim: int, qk_norm: bool
) -> None:
    operands = Operands(gpu, dtype, seed=head_dim)
    for (num_heads, num_kv_heads), rotary_dim in zip(
        ((1, 1), (8, 2), (14, 2)), (None, head_dim // 2, 6), strict=True
    ):
        heads = Heads(num_heads, num_kv_heads, head_dim, rotary_dim=rotary_dim)
        plain = attention_weights(operands, heads, qk_norm)
        spans = [Span(0, block_size), Span(block_size - 1, 2), Span(2000, 1), Span(3, 0)]
        step = Step(operands, spans, heads, block_size, num_padding=2)
        qkv, rope = operands.tensor(step.num_tokens, heads.qkv_size), operands.ropes(heads)
        caches, device_caches = step.caches()
        weights = operands.on_gpu(plain)
        got = ops.rope_and_cache_write(qkv.device, weights, device_caches, rope.device, step.device)
        with operands.on_cpu():
            wanted = reference.rope_and_cache_write(
                qkv.plain, plain, caches, rope.plain, step.plain
            )
        for mine, theirs in zip(flat(got), flat(wanted), strict=True):
            compare(mine, theirs, dtype)
        for given, returned in zip(device_caches, got[1], strict=True):
            assert given.data_ptr() == returned.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rope_in_two_dimensions(gpu: devices.Device, dtype: str, head_dim: int) -> None:
    operands, heads = Operands(gpu, dtype), Heads(3, 3, head_dim, rotary_dim=head_dim // 2)
    plain = attention_weights(operands, heads)
    block = dataclasses.replace(plain.block, positions=Positions(two_dimensional=True))
    plain = dataclasses.replace(plain, block=block)
    spans = [Span(0, 600), Span(40, 1), Span(2000, 1)]
    step = Step(operands, spans, heads, 32, num_padding=2, prefix_lens=[500, 30, 1000])
    qkv, rope = operands.tensor(step.num_tokens, heads.qkv_size), operands.ropes(heads)
    caches, device_caches = step.caches()
    weights = operands.on_gpu(plain)
    got = ops.rope_and_cache_write(qkv.device, weights, device_caches, rope.device, step.device)
    with operands.on_cpu():
        wanted = reference.rope_and_cache_write(qkv.plain, plain, caches, rope.plain, step.plain)
    for mine, theirs in zip(flat(got), flat(wanted), strict=True):
        compare(mine, theirs, dtype)


def check_attention(
    gpu: devices.Device,
    dtype: str,
    heads: Heads,
    block_size: int,
    spans: list[Span],
    num_padding: int = 0,
    prefix_lens: Sequence[int] = (),
) -> None:
    operands = Operands(gpu, dtype, seed=heads.head_dim)
    step = Step(operands, spans, heads, block_size, num_padding, True, prefix_lens)
    attention = attention_weights(operands, heads)
    block = dataclasses.replace(attention.block, prefix_mask=bool(prefix_lens))
    attention = dataclasses.replace(attention, block=block)
    q = operands.tensor(step.num_tokens, heads.size)
    caches, device_caches = step.caches()
    weights = operands.on_gpu(attention)
    got = ops.paged_attention(q.device, weights, device_caches, step.device).cpu()
    with operands.on_cpu():
        wanted = reference.paged_attention(q.plain, attention, caches, step.plain)
    used = step.num_tokens - num_padding
    compare_heads(got[:used], wanted, heads, dtype)
    assert (numpy_of(got[used:]) == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_decode_attention(gpu: devices.Device, dtype: str, block_size: int, head_dim: int) -> None:
    heads = Heads(*HEADS[(head_dim // 16 + block_size // 16) % len(HEADS)], head_dim)
    check_attention(gpu, dtype, heads, block_size, decode_spans(block_size), num_padding=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_mixed_attention(gpu: devices.Device, dtype: str, block_size: int, head_dim: int) -> None:
    heads = Heads(*HEADS[(head_dim // 16 + block_size // 16) % len(HEADS)], head_dim)
    check_attention(gpu, dtype, heads, block_size, prefill_spans(block_size), num_padding=5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), HEADS)
@pytest.mark.parametrize("spans", ["decode", "mixed"])
def test_attention_weights_any_group(
    gpu: devices.Device, dtype: str, head_dim: int, num_heads: int, num_kv_heads: int, spans: str
) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim)
    make = {"decode": decode_spans, "mixed": prefill_spans}[spans]
    check_attention(gpu, dtype, heads, 64, make(64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [1, 40, 1500])
def test_windowed_attention(gpu: devices.Device, dtype: str, head_dim: int, window: int) -> None:
    heads = Heads(4, 2, head_dim, window)
    check_attention(gpu, dtype, heads, 32, decode_spans(32))
    check_attention(gpu, dtype, heads, 32, prefill_spans(32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("window", [-1, 40])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (8, 2), (64, 8)])
def test_attention_with_sinks(
    gpu: devices.Device, dtype: str, head_dim: int, num_heads: int, num_kv_heads: int, window: int
) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim, window, sinks=True)
    check_attention(gpu, dtype, heads, 32, decode_spans(32), num_padding=3)
    check_attention(gpu, dtype, heads, 32, prefill_spans(32))
    if num_heads == 8:
        check_attention(gpu, dtype, heads, 64, [Span(32_767, 1), Span(9, 1), Span(20_000, 3)])
        check_attention(gpu, dtype, heads, 64, [Span(11_000, 70)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (8, 2)])
def test_attention_behind_a_prefix_mask(
    gpu: devices.Device, dtype: str, head_dim: int, num_heads: int, num_kv_heads: int
) -> None:
    heads = Heads(num_heads, num_kv_heads, head_dim)
    prompts = {300: 299, 2: 1, 129: 64, 1: 1, 700: 513, 17: 17, 40: 0}
    mixed = [Span(90, 1), *(Span(0, count) for count in prompts), Span(20, 5), Span(7, 0)]
    prefixes = [60, *prompts.values(), 20, 7]
    check_attention(gpu, dtype, heads, 32, mixed, 3, prefixes)
    check_attention(gpu, dtype, heads, 32, mixed[:1] * 3, prefix_lens=[60, 1, 91])
    check_attention(gpu, dtype, heads, 64, [Span(0, 9)], prefix_lens=[8])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_long_contexts(gpu: devices.Device, dtype: str, head_dim: int) -> None:
    heads = Heads(4, 1, head_dim)
    decode = [Span(32_767, 1), Span(32_768, 1), Span(9, 1), Span(20_000, 3), Span(4093, 17)]
    check_attention(gpu, dtype, heads, 64, decode)
    for span in (Span(0, 4096), Span(31_000, 70)):
        check_attention(gpu, dtype, Heads(2, 1, head_dim), 64, [span])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bias", "qk_norm", "sinks"),
    [(False, False, False), (True, True, False), (True, False, True)],
)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_attention_block(
    gpu: devices.Device, dtype: str, bias: bool, qk_norm: bool, sinks: bool, head_dim: int
) -> None:
    operands, heads = Operands(gpu, dtype), Heads(8, 2, head_dim, sinks=sinks)
    plain = operands.layer(200, 8, heads, bias, qk_norm)[0]
    weights, rope = operands.on_gpu(plain), operands.ropes(heads)
    for spans in (decode_spans(32), prefill_spans(32)):
        step = Step(operands, spans, heads, 32)
        hidden = operands.tensor(step.num_tokens, 200)
        caches, device_caches = step.caches()
        got = ops.attention_block(hidden.device, weights, device_caches, rope.device, step.device)
        with operands.on_cpu():
            wanted = reference.attention_block(hidden.plain, plain, caches, rope.plain, step.plain)
        for mine, theirs in zip(flat(got), flat(wanted), strict=True):
            compare(mine, theirs, dtype, BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("window", [-1, 40])
def test_attention_block_of_some_rows(
    gpu: devices.Device, dtype: str, folded: bool, window: int
) -> None:
    operands, heads = Operands(gpu, dtype), Heads(8, 2, 64, window)
    plain = operands.layer(256, 320, heads, True, True)
    layer = operands.on_gpu(plain)
    weights, rope = (
        attention_part(fold_norms(layer, ops) if folded else layer),
        operands.ropes(heads),
    )
    few = [Span(0, 17), Span(3, 1), Span(40, 5)]
    for spans in (few, [span for span in prefill_spans(32) if span.new]):
        step = Step(operands, spans, heads, 32)
        hidden = operands.tensor(step.num_tokens, 256)
        lasts = step.arrays.logit_indices
        everything = np.arange(step.num_tokens)
        for rows in (lasts, everything, np.array([5, 0, 9, 9, 3, 1, 2])):
            caches, device_caches = step.caches()
            rows = rows.astype(np.int32)
            got = ops.attention_block(
                hidden.device,
                weights,
                device_caches,
                rope.device,
                step.device,
                rows=operands.placed(rows),
            )
            with operands.on_cpu():
                everywhere = reference.attention_block(
                    hidden.plain, plain[0], caches, rope.plain, step.plain
                )
            assert got[0].shape == [len(rows), 256]
            wanted = numpy_of(everywhere[0])[rows]
            assert_close(numpy_of(got[0]), wanted, dtype, 2 * BLOCK_ROUNDINGS)
            for mine, theirs in zip(flat(got)[1:], flat(everywhere)[1:], strict=True):
                compare(mine, theirs, dtype, 2 * BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_block(gpu: devices.Device, dtype: str, bias: bool) -> None:
    operands = Operands(gpu, dtype)
    plain = operands.layer(200, 328, Heads(), bias, False)[1]
    weights = operands.on_gpu(plain)
    for rows in ROWS:
        hidden = operands.tensor(rows, 200)
        with operands.on_cpu():
            wanted = reference.mlp_block(hidden.plain, plain)
        compare(ops.mlp_block(hidden.device, weights), wanted, dtype, BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_layers_of_every_form(gpu: devices.Device, dtype: str, form: str, make: Any) -> None:
    operands, heads = Operands(gpu, dtype), Heads(8, 2, 64)
    rope = operands.ropes(heads)
    step = Step(operands, [span for span in make(32) if span.new], heads, 32)
    for hidden_size, inner in ((256, 320), (100, 36)):
        plain = [
            layer_of(
                blocks_of(form, (8, 2, 64), inner),
                hidden_size,
                operands.linear,
                lambda size, around: operands.tensor(size, around=around, scale=0.1).plain,
                lambda values: operands.both(values).plain,
            )
            for _ in range(2)
        ]
        layers = [operands.on_gpu(layer) for layer in plain]
        hidden = operands.tensor(step.num_tokens, hidden_size)
        pairs = [step.caches() for _ in plain]
        got = ops.layers(
            hidden.device, layers, [pair[1] for pair in pairs], rope.device, step.device
        )
        with operands.on_cpu():
            wanted = reference.layers(
                hidden.plain, plain, [pair[0] for pair in pairs], rope.plain, step.plain
            )
        for mine, theirs in zip(flat(got), flat(wanted), strict=True):
            compare(mine, theirs, dtype, 3 * BLOCK_ROUNDINGS)
        last = ops.layers(
            hidden.device,
            layers[:1],
            [step.caches()[1]],
            rope.device,
            step.device,
            rows=step.device.logit_indices,
        )
        with operands.on_cpu():
            whole = reference.layers(
                hidden.plain, plain[:1], [step.caches()[0]], rope.plain, step.plain
            )
        rows = step.arrays.logit_indices
        assert_close(numpy_of(last[0]), numpy_of(whole[0])[rows], dtype, 2 * BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_all_layers_in_one_call_equal_the_block_ops(
    gpu: devices.Device, dtype: str, folded: bool, make: Any
) -> None:
    operands, heads = Operands(gpu, dtype), Heads(8, 2, 64)
    layers: list[Layer] = [
        operands.on_gpu(operands.layer(256, 320, dataclasses.replace(heads, window=w), True, True))
        for w in (-1, 40)
    ]
    if folded:
        layers = [fold_norms(layer, ops) for layer in layers]
    step, rope = Step(operands, make(32), heads, 32), operands.ropes(heads)
    hidden = operands.tensor(step.num_tokens, 256).device
    whole, written = ops.layers(
        hidden, layers, [step.caches()[1] for _ in layers], rope.device, step.device
    )
    wanted, expected = hidden, []
    for layer in layers:
        wanted, pair = ops.attention_block(
            wanted, attention_part(layer), step.caches()[1], rope.device, step.device
        )
        mlp = layer[1]
        assert isinstance(mlp, Mlp)
        wanted = ops.mlp_block(wanted, mlp)
        expected += pair
    for got, want in zip([whole, *written], [wanted, *expected], strict=True):
        if folded:  # a product leaves sums of squares in other pieces than a kernel that takes them
            compare(got, want, dtype, BLOCK_ROUNDINGS)
        else:
            same(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_folded_norms_change_little(gpu: devices.Device, dtype: str) -> None:
    operands, heads = Operands(gpu, dtype), Heads(4, 2, 64)
    plain = operands.layer(256, 320, heads, True, False)
    folded = fold_norms(operands.on_gpu(plain), ops)
    assert attention_part(folded).qkv.scheme == "dense_folded"
    rope = operands.ropes(heads)
    for spans in (decode_spans(32), prefill_spans(32)):
        step = Step(operands, spans, heads, 32)
        hidden = operands.tensor(step.num_tokens, 256)
        caches, device_caches = step.caches()
        got, _ = ops.layers(hidden.device, [folded], [device_caches], rope.device, step.device)
        with operands.on_cpu():
            wanted, _ = reference.layers(hidden.plain, [plain], [caches], rope.plain, step.plain)
        compare(got, wanted, dtype, 2 * BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_graph_replay_equals_eager_bit_for_bit(gpu: devices.Device, dtype: str) -> None:
    import paddle

    operands, heads = Operands(gpu, dtype), Heads(8, 2, 128)
    layers = [operands.on_gpu(operands.layer(256, 320, heads, True, False)) for _ in range(2)]
    head, norm = operands.on_gpu(operands.linear(256, 1000)), operands.tensor(256).device
    rope, hidden = operands.ropes(heads), operands.tensor(7, 256).device
    contexts = [(1, 2, 15, 16, 17, 700, 5000), (40, 64, 65, 3, 900, 1, 4097), (5000,) * 7]
    steps = [Step(operands, [Span(n - 1, 1) for n in c], heads, 32) for c in contexts]
    limits = paddle.to_tensor(max_lens_of([1], [5000]), place=paddle.CPUPlace())
    shape = (7, -(-5000 // 32))
    num_blocks = max(step.pools[0].shape[0] for step in steps)
    pool = (num_blocks, *steps[0].pools[0].shape[1:])
    caches = [(paddle.zeros(pool, dtype), paddle.zeros(pool, dtype)) for _ in layers]
    inputs = steps[0].device._replace(
        block_tables=operands.placed(np.full(shape, -1, np.int32)), max_lens=limits
    )

    def run() -> tuple[Any, Any]:
        out, _ = ops.layers(hidden, layers, caches, rope.device, inputs)
        return out, ops.logits(out, head_of(head, norm), inputs.logit_indices)

    def load(step: Step) -> None:
        tables = np.full(shape, -1, np.int32)
        tables[:, : step.arrays.block_tables.shape[1]] = step.arrays.block_tables
        values = step.arrays._replace(block_tables=tables)
        for target, array in zip(inputs.given[:-1], values.given[:-1], strict=True):
            target.set_value(operands.placed(np.ascontiguousarray(array, np.int32)))
        for pair in caches:
            for target, source in zip(pair, step.pools, strict=True):
                content = np.zeros(pool, np.float32)
                content[: len(source)] = np.nan_to_num(source)
                target.set_value(operands.placed(content, dtype))

    addresses = [tensor.data_ptr() for tensor in [*inputs.given[:-1], *caches[0]]]
    load(steps[0])
    graph = cuda.GraphPool(gpu).capture(run)
    for step in steps:
        load(step)
        eager = [numpy_of(tensor) for tensor in (*run(), *caches[1])]
        load(step)
        graph.replay()
        for got, want in zip((*graph.outputs, *caches[1]), eager, strict=True):
            np.testing.assert_array_equal(numpy_of(got), want)
    assert addresses == [tensor.data_ptr() for tensor in [*inputs.given[:-1], *caches[0]]]


def sampling_columns(operands: Operands, rows: int) -> list[Any]:
    generator = operands.generator
    return [
        generator.choice([0.0, 0.5, 1.0, 2.0], rows).astype(np.float32),
        generator.choice([0, 1, 5, 50, 200], rows).astype(np.int32),
        generator.choice([0.1, 0.7, 0.95, 1.0], rows).astype(np.float32),
        generator.integers(0, 1 << 62, rows),
        generator.integers(0, 1 << 20, rows),
        generator.choice([0.0, 0.02, 0.3], rows).astype(np.float32),
        generator.choice([1.0, 1.0, 0.9, 0.3], rows).astype(np.float32),
    ]


@pytest.mark.parametrize("vocab", [5, 97, 1000, 32_000, 128_256])
def test_sampling_chooses_what_the_cpu_chooses(gpu: devices.Device, vocab: int) -> None:
    import paddle

    operands = Operands(gpu, "float32", seed=vocab)
    rows = 300
    logits = operands.generator.standard_normal((rows, vocab), np.float32) * 3
    logits[::7, ::3] = -np.inf
    columns = sampling_columns(operands, rows)
    got = ops.sample(*(operands.placed(values) for values in (logits, *columns))).numpy()
    with operands.on_cpu():
        wanted = ops.sample(*(paddle.to_tensor(v) for v in (logits, *columns))).numpy()
    # A draw on the border of two tokens may fall either way with another order of summation, and a
    # token on the border of the typical ones is many draws' border.
    assert (got != wanted).sum() <= 3


def test_sampling_rules(gpu: devices.Device) -> None:
    operands = Operands(gpu, "float32")
    rows, vocab = 2000, 64
    row = operands.generator.standard_normal(vocab).astype(np.float32) * 2
    row[[5, 9]] = row.max() + 1  # equal: the lower index comes first
    logits = np.tile(row, (rows, 1))
    order = np.argsort(-row, kind="stable")
    weights = np.exp(row[order].astype(np.float64) - row.max())
    share = np.cumsum(weights / weights.sum())

    def draw(temperature: float, top_k: int, top_p: float) -> Any:
        values = (
            logits,
            np.full(rows, temperature, np.float32),
            np.full(rows, top_k, np.int32),
            np.full(rows, top_p, np.float32),
            np.arange(rows, dtype=np.int64),
            np.full(rows, 3, np.int64),
        )
        return ops.sample(*(operands.placed(value) for value in values)).numpy()

    assert (draw(0.0, 0, 1.0) == 5).all()
    assert (draw(1.0, 1, 1.0) == 5).all()
    assert set(draw(1.0, 3, 1.0)) == set(order[:3].tolist())
    nucleus = order[: int(np.searchsorted(share, 0.8)) + 1]
    assert set(draw(1.0, 0, 0.8)) == set(nucleus.tolist())
    drawn = draw(1.0, 0, 1.0)
    np.testing.assert_array_equal(drawn, draw(1.0, 0, 1.0))
    counts = np.bincount(drawn, minlength=vocab)[order] / rows
    assert np.abs(np.cumsum(counts) - share).max() < 0.04  # Kolmogorov: 2000 draws, p 0.003


def drawn_with(operands: Operands, rows: Any, seed: int, **columns: Any) -> Any:
    """Tokens of rows [N, V]; columns: scalars or arrays [N]."""
    count = len(rows)

    def column(name: str, default: float, dtype: Any) -> Any:
        return np.ascontiguousarray(np.broadcast_to(columns.get(name, default), count), dtype)

    values = (
        rows,
        column("temperature", 1.0, np.float32),
        column("top_k", 0, np.int32),
        column("top_p", 1.0, np.float32),
        np.full(count, seed, np.int64),
        np.arange(count, dtype=np.int64),
        column("min_p", 0.0, np.float32),
        column("typical_p", 1.0, np.float32),
    )
    return ops.sample(*(operands.placed(value) for value in values)).numpy()


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_distribution(gpu: devices.Device, setting: str) -> None:
    rows = np.tile(LOGITS.astype(np.float32), (NUM_DRAWS, 1))
    tokens = drawn_with(Operands(gpu, "float32"), rows, 77, **SETTINGS[setting])
    assert_follows(tokens, distribution(LOGITS, **SETTINGS[setting]))  # type: ignore[arg-type]


def test_masked_tokens_are_never_drawn_in_five_million(gpu: devices.Device) -> None:
    operands = Operands(gpu, "float32")
    generator, count, size = operands.generator, 100_000, 33
    possible = generator.random(size) < 0.3
    row = np.where(possible, generator.standard_normal(size), -np.inf).astype(np.float32)
    row[np.flatnonzero(~possible)[::3]] = -1000  # too unlikely for float32 to have a weight
    rows = np.tile(row, (count, 1))
    kinds = list(SETTINGS.values())
    columns = {
        name: np.array([kinds[i % len(kinds)].get(name, off) for i in range(count)])
        for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("typical_p", 1.0))
    }
    for seed in range(50):
        assert possible[drawn_with(operands, rows, seed, **columns)].all()


def test_row_that_cannot_be_drawn_from_gets_no_token(gpu: devices.Device) -> None:
    operands = Operands(gpu, "float32")
    logits = np.zeros((3, 100), np.float32)
    logits[0, 7] = np.nan
    logits[1] = -np.inf
    logits[2, 40] = 9
    columns = (
        np.ones(3, np.float32),
        np.zeros(3, np.int32),
        np.full(3, 0.5, np.float32),
        np.zeros(3, np.int64),
        np.zeros(3, np.int64),
    )
    got = ops.sample(*(operands.placed(values) for values in (logits, *columns))).numpy()
    assert got.tolist() == [-1, -1, 40]


@pytest.mark.parametrize("vocab", [1, 5, 1000, 32_001, 128_256])
@pytest.mark.parametrize("kind", ["normal", "coarse", "equal", "banned", "strided"])
def test_logprobs_are_what_numpy_measures(gpu: devices.Device, vocab: int, kind: str) -> None:
    operands = Operands(gpu, "float32", seed=vocab)
    rows, num_top = 9, min(20, vocab)
    logits = operands.generator.standard_normal((rows, vocab), np.float32) * 3
    if kind == "coarse":
        logits = np.round(logits / 3)  # many ties
    elif kind == "equal":
        logits[:] = 1.5
    elif kind == "banned":
        logits[:, 1::7] = -np.inf
    elif kind == "strided":
        # More than a block collects: quads of a few of its threads have all large logits.
        logits[:, np.arange(vocab) // 4 % 1024 < 9] += 40
    tokens = operands.generator.integers(0, vocab, rows).astype(np.int32)
    measured = ops.logprobs(operands.placed(logits), operands.placed(tokens), num_top).numpy()
    got, wanted = read_table(measured), measure(logits, tokens.tolist(), num_top)
    np.testing.assert_array_equal(got.ranks, wanted.ranks)
    np.testing.assert_allclose(got.logprobs, wanted.logprobs, rtol=2e-5, atol=2e-5)
    finite = np.isfinite(wanted.top_logprobs)
    np.testing.assert_array_equal(got.top_token_ids[finite], wanted.top_token_ids[finite])
    np.testing.assert_allclose(got.top_logprobs, wanted.top_logprobs, rtol=2e-5, atol=2e-5)


def test_steps_without_tokens_return_nothing(gpu: devices.Device) -> None:
    import paddle

    operands, heads = Operands(gpu, "bfloat16"), Heads()
    layer = operands.on_gpu(operands.layer(64, 64, heads, True, False))
    empty = paddle.empty([0, 64], "bfloat16")
    assert ops.mlp_block(empty, layer[1]).shape == [0, 64]
    assert ops.linear(empty, layer[1].gate_up).shape == [0, 128]
    norm = layer[1].norm
    assert norm is not None
    assert ops.rms_norm(empty, norm.weight, None, 1e-5)[0].shape == [0, 64]


def test_tensors_of_two_devices_are_refused_by_name(gpu: devices.Device) -> None:
    operands, heads = Operands(gpu, "float32"), Heads()
    layer = operands.on_gpu(operands.layer(64, 64, heads, True, False))
    x = operands.tensor(3, 64)
    with pytest.raises(ValueError, match=r"x is on Place\(cpu\)"):
        ops.linear(x.plain, layer[1].gate_up)
    with pytest.raises(ValueError, match=r"hidden is on Place\(cpu\)"):
        ops.mlp_block(x.plain, layer[1])
    step = Step(operands, [Span(3, 1)], heads, 32)
    q = operands.tensor(1, heads.size)
    with pytest.raises(ValueError, match=r"q is on Place\(cpu\)"):
        ops.paged_attention(q.plain, layer[0], step.caches()[1], step.device)


def test_sizes_that_no_kernel_has_are_refused_by_name(gpu: devices.Device) -> None:
    operands = Operands(gpu, "float32")
    for heads, block_size, words in (
        (Heads(2, 1, 64), 24, "block_size 24 .*allowed: 16, 32, 64, 128"),
        (Heads(2, 1, 320), 32, "head_dim 320 is larger than 256"),
    ):
        step = Step(operands, [Span(3, 1)], heads, block_size)
        q = operands.tensor(1, heads.size).device
        with pytest.raises(ValueError, match=f"(?s){words}"):
            ops.paged_attention(
                q, attention_weights(operands, heads), step.caches()[1], step.device
            )


def test_packed_weights_are_refused(gpu: devices.Device) -> None:
    operands = Operands(gpu, "float32")
    plain = operands.linear(64, 64)
    packed = dataclasses.replace(plain, tensors=(operands.tensor(2, 64, 32).device,))
    with pytest.raises(ValueError, match="as checkpoints store them, not packed"):
        ops.linear(operands.tensor(3, 64).device, packed)
