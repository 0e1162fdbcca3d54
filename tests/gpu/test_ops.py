"""Each operator on the GPU against its plain twin in float32, over odd shapes.

Slots of the cache that no token of a request has written hold NaN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from predict.device import cuda, devices
from predict.loading.build import fold_norms
from predict.nn.blocks import Activation, BlockStep, Norm, NormKind, NormWeights
from predict.nn.decoder import Layer
from predict.nn.inputs import max_lens_of
from predict.nn.kinds.attention import Attention
from predict.nn.kinds.mlp import Mlp
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.block_forms import FORMS
from tests.support.distributions import LOGITS, NUM_DRAWS, SETTINGS, assert_follows, distribution
from tests.support.gpu_operands import (
    DTYPES,
    Heads,
    Operands,
    Span,
    Step,
    attention_weights,
    check_layers,
    compare,
    decode_spans,
    flat,
    numpy_of,
    prefill_spans,
    same,
)
from tests.support.records import head_of
from tests.support.tolerances import BLOCK_ROUNDINGS

ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 256, 257)
SHAPES = ((64, 64), (200, 136), (131, 67), (1024, 1536))  # K, N


def attention_part(layer: Layer) -> Attention:
    attention = layer[0]
    assert isinstance(attention, Attention)
    return attention


def check_rows(
    operands: Operands,
    width: int,
    run: Callable[[Any, Any, int], Any],
    scale: float = 1.0,
    roundings: int = 1,
) -> None:
    """Asserts that run(operators, x, which) is the plain twin's (which 0) on the GPU (which 1)."""
    for rows in ROWS:
        x = operands.tensor(rows, width, scale=scale)
        with operands.on_cpu():
            wanted = run(reference, x.plain, 0)
        compare(run(ops, x.device, 1), wanted, operands.dtype, roundings)


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
    weights = plain, operands.on_gpu(plain)
    check_rows(operands, num_in, lambda module, x, which: module.linear(x, weights[which]))


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
    check_rows(
        operands,
        parts * size,
        lambda module, x, which: module.norm(x, NormWeights(weight[which]), settings),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 88, 131, 4864])
def test_silu_mul(gpu: devices.Device, dtype: str, width: int) -> None:
    silu = Activation()
    operands = Operands(gpu, dtype)
    check_rows(operands, 2 * width, lambda module, x, which: module.activate(x, silu), scale=3.0)


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


# Hidden size, biases and norms of heads, a shape, and whether norms are folded.
ATTENTIONS = [
    *(
        (200, with_more, Heads(8, 2, head_dim, sinks=sinks), False)
        for with_more, sinks in ((False, False), (True, False), (True, True))
        for head_dim in (64, 80, 128)
    ),
    *(
        (256, True, Heads(8, 2, 64, window), folded)
        for window in (-1, 40)
        for folded in (False, True)
    ),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden_size", "with_more", "heads", "folded"), ATTENTIONS)
def test_attention_block(
    gpu: devices.Device, dtype: str, hidden_size: int, with_more: bool, heads: Heads, folded: bool
) -> None:
    operands = Operands(gpu, dtype)
    plain = operands.layer(hidden_size, 320, heads, with_more, with_more and not heads.sinks)
    layer = operands.on_gpu(plain)
    weights = attention_part(fold_norms(layer, ops) if folded else layer)
    rope = operands.ropes(heads)
    few = [Span(0, 17), Span(3, 1), Span(40, 5)]
    many = [span for span in prefill_spans(32) if span.new]
    for spans in (decode_spans(32), prefill_spans(32), few, many):
        step = Step(operands, spans, heads, 32)
        hidden = operands.tensor(step.num_tokens, hidden_size)
        caches = step.caches()[0]
        with operands.on_cpu():
            out, kept = reference.block(
                hidden.plain, plain[0], BlockStep(caches, rope.plain, step.plain)
            )
        each: list[Any] = [None]
        if spans in (few, many):
            everything = np.arange(step.num_tokens)
            each += [step.arrays.logit_indices, everything, np.array([5, 0, 9, 9, 3, 1, 2])]
        for rows in each:
            inputs = step.device if rows is None else step.of_rows(rows)
            some = None if rows is None else inputs.logit_indices
            got = ops.block(
                hidden.device, weights, BlockStep(step.caches()[1], rope.device, inputs, rows=some)
            )
            wanted = numpy_of(out) if rows is None else numpy_of(out)[rows]
            assert got[0].shape == list(wanted.shape)
            roundings = BLOCK_ROUNDINGS if rows is None and not folded else 2 * BLOCK_ROUNDINGS
            for mine, theirs in zip(flat(got), [wanted, *kept], strict=True):
                compare(mine, theirs, dtype, roundings)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_mlp_block(gpu: devices.Device, dtype: str, bias: bool) -> None:
    operands = Operands(gpu, dtype)
    plain = operands.layer(200, 328, Heads(), bias, False)[1]
    weights = plain, operands.on_gpu(plain)
    check_rows(
        operands,
        200,
        lambda module, x, which: module.block(x, weights[which])[0],
        roundings=BLOCK_ROUNDINGS,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_layers_of_every_form(gpu: devices.Device, dtype: str, form: str, make: Any) -> None:
    operands, heads = Operands(gpu, dtype), Heads(8, 2, 64)
    step = Step(operands, [span for span in make(32) if span.new], heads, 32)
    for hidden_size, inner in ((256, 320), (100, 36)):
        plain = [operands.layer_of_form(form, (8, 2, 64), hidden_size, inner) for _ in range(2)]
        layers = [operands.on_gpu(layer) for layer in plain]
        check_layers(step, heads, plain, layers, hidden_size, 3 * BLOCK_ROUNDINGS)


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
        wanted, pair = ops.block(
            wanted, attention_part(layer), BlockStep(step.caches()[1], rope.device, step.device)
        )
        mlp = layer[1]
        assert isinstance(mlp, Mlp)
        wanted = ops.block(wanted, mlp)[0]
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
    for make in (decode_spans, prefill_spans):
        step = Step(operands, [span for span in make(32) if span.new], heads, 32)
        check_layers(step, heads, [plain], [folded], 256, 2 * BLOCK_ROUNDINGS)


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


def sampled(operands: Operands, on_cpu: bool, logits: Any, **columns: Any) -> Any:
    """Tokens of rows [N, V], on the GPU or the CPU; columns: scalars or arrays [N]."""
    import paddle

    count = len(logits)

    def column(name: str, default: float, dtype: Any) -> Any:
        return np.ascontiguousarray(np.broadcast_to(columns.get(name, default), count), dtype)

    values = (
        logits,
        column("temperature", 1.0, np.float32),
        column("top_k", 0, np.int32),
        column("top_p", 1.0, np.float32),
        column("seed", 0, np.int64),
        column("offset", 0, np.int64) + np.arange(count),
        column("min_p", 0.0, np.float32),
        column("typical_p", 1.0, np.float32),
    )
    if not on_cpu:
        return ops.sample(*map(operands.placed, values)).numpy()
    with operands.on_cpu():
        return ops.sample(*map(paddle.to_tensor, values)).numpy()


@pytest.mark.parametrize("vocab", [5, 97, 1000, 32_000, 128_256])
def test_sampling_chooses_what_the_cpu_chooses(gpu: devices.Device, vocab: int) -> None:
    operands = Operands(gpu, "float32", seed=vocab)
    generator, rows = operands.generator, 300
    logits = generator.standard_normal((rows, vocab), np.float32) * 3
    logits[::7, ::3] = -np.inf
    logits[1::7, [1, 3]] = logits[1::7].max(axis=1, keepdims=True) + 1  # the lower one comes first
    logits[2::50, vocab // 2] = np.nan  # these and the next ones cannot be drawn from
    logits[3::50] = -np.inf
    columns = {
        "temperature": generator.choice([0.0, 0.5, 1.0, 2.0], rows),
        "top_k": generator.choice([0, 1, 3, 5, 50, 200], rows),
        "top_p": generator.choice([0.1, 0.7, 0.95, 1.0], rows),
        "seed": generator.integers(0, 1 << 62, rows),
        "offset": generator.integers(0, 1 << 20, rows),
        "min_p": generator.choice([0.0, 0.02, 0.3], rows),
        "typical_p": generator.choice([1.0, 1.0, 0.9, 0.3], rows),
    }
    got, wanted = (sampled(operands, on_cpu, logits, **columns) for on_cpu in (False, True))
    np.testing.assert_array_equal(got == -1, wanted == -1)
    # A draw on the border of two tokens may fall either way with another order of summation, and a
    # token on the border of the typical ones is many draws' border.
    assert (got != wanted).sum() <= 3


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_distribution(gpu: devices.Device, setting: str) -> None:
    rows = np.tile(LOGITS.astype(np.float32), (NUM_DRAWS, 1))
    tokens = sampled(Operands(gpu, "float32"), False, rows, seed=77, **SETTINGS[setting])
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
        assert possible[sampled(operands, False, rows, seed=seed, **columns)].all()


def test_steps_without_tokens_return_nothing(gpu: devices.Device) -> None:
    import paddle

    operands, heads = Operands(gpu, "bfloat16"), Heads()
    layer = operands.on_gpu(operands.layer(64, 64, heads, True, False))
    empty = paddle.empty([0, 64], "bfloat16")
    assert ops.block(empty, layer[1])[0].shape == [0, 64]
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
        ops.block(x.plain, layer[1])
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
