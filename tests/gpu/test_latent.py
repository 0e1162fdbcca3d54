"""Latent attention on the GPU, by matrix units and without, against the plain twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict.device import devices, library
from predict.nn.blocks import HeadSlot, LatentAttentionBlock, LinearSlot, Norm, NormSlot
from predict.nn.decoder import HeadMatrices, LatentAttention, NormWeights, map_tensors
from predict.nn.inputs import to_tensors
from predict.nn.rope import rope_table
from predict.nn.spec import RopeSpec
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.gpu_operands import (
    BLOCK_SIZES,
    Heads,
    Operands,
    Span,
    Step,
    compare,
    decode_spans,
    numpy_of,
    prefill_spans,
)

DTYPES = ("float32", "bfloat16", "float16")
HIDDEN, POSITIONS = 128, 6000
ROUNDINGS = 8  # norms, four products, weights, latents
FORMS = {
    "16 heads": LatentAttentionBlock(16, 64, 32, 32, 48, 0.1),
    "3 heads": LatentAttentionBlock(3, 96, 16, 32, 32, 0.1),
    "odd sizes": LatentAttentionBlock(3, 24, 16, 8, 20, 0.1),
    "32 heads": LatentAttentionBlock(32, 64, 16, 32, 16, 0.1),
    "128 heads": LatentAttentionBlock(128, 512, 16, 64, 16, 0.05),
    "queries of a rank": LatentAttentionBlock(
        20, 64, 32, 32, 48, 0.1, q_lora_rank=40, q_a_norm=Norm()
    ),
}


def weights_of(operands: Operands, block: LatentAttentionBlock) -> LatentAttention:
    """Random ones, float32 on the CPU, rounded to the dtype."""

    def norm(size: int) -> NormWeights:
        return NormWeights(operands.tensor(size, around=1.0, scale=0.1).plain)

    slots: dict[str, Any] = {}
    for slot in block.slots(HIDDEN):
        if isinstance(slot, NormSlot):
            slots[slot.name] = norm(slot.size)
        elif isinstance(slot, LinearSlot):
            slots[slot.name] = operands.linear(slot.in_features, sum(slot.part_sizes))
        elif isinstance(slot, HeadSlot):
            heads, rank = block.num_heads, block.kv_lora_rank
            keys, values = (
                operands.tensor(heads, size, rank, scale=rank**-0.5).plain
                for size in slot.part_sizes
            )
            slots[slot.name] = HeadMatrices(keys, values)
    return LatentAttention(block, **slots)


def on_gpu(operands: Operands, weights: LatentAttention) -> LatentAttention:
    """As the kernels take them: with the first matrix of each head turned, too."""
    keys = weights.kv_b.key_up
    turned = replace(weights.kv_b, key_absorb=keys.transpose([0, 2, 1]).contiguous())

    def placed(path: str, tensor: Any) -> Any:
        return tensor.astype(operands.dtype)._copy_to(operands.gpu.place(), True)

    return map_tensors(replace(weights, kv_b=turned), placed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_latent_attention_equals_the_plain_twin(
    gpu: devices.Device, dtype: str, form: str, make: Any
) -> None:
    import paddle

    operands, block = Operands(gpu, dtype), FORMS[form]
    with operands.on_cpu():
        weights = weights_of(operands, block)
    with operands.on_cpu():
        placed = on_gpu(operands, weights)
    table = rope_table(RopeSpec(), block.qk_rope_head_dim, POSITIONS, POSITIONS)
    ropes = (paddle.to_tensor(table, place=paddle.CPUPlace()),), (operands.placed(table),)
    heads = Heads(block.num_heads, 1, block.latent_size)
    size = BLOCK_SIZES[len(form) % len(BLOCK_SIZES)]
    spans = make(size)
    if block.num_heads > 64:
        spans = [span for span in spans if span.cached + span.new < 1000][:6]
    step = Step(operands, spans, heads, size)
    hidden = operands.tensor(step.num_tokens, HIDDEN)
    (plain_cache, _), (cache, _) = step.caches()
    got, written = ops.layers(hidden.device, [(placed,)], [(cache,)], ropes[1], step.device)
    with operands.on_cpu():
        wanted, kept = reference.layers(
            hidden.plain, [(weights,)], [(plain_cache,)], ropes[0], step.plain
        )
    compare(got, wanted, dtype, ROUNDINGS)
    compare(written[0], kept[0], dtype, ROUNDINGS)


def test_parts_of_a_context_are_added_up(gpu: devices.Device) -> None:
    import paddle

    operands, block = Operands(gpu, "bfloat16"), FORMS["16 heads"]
    with operands.on_cpu():
        weights = weights_of(operands, block)
        placed = on_gpu(operands, weights)
    table = rope_table(RopeSpec(), block.qk_rope_head_dim, POSITIONS, POSITIONS)
    heads = Heads(block.num_heads, 1, block.latent_size)
    step = Step(operands, [Span(5000, 1), Span(3, 1), Span(1023, 1)], heads, 64)
    hidden = operands.tensor(3, HIDDEN)
    (plain_cache, _), (cache, _) = step.caches()
    got, _ = ops.layers(
        hidden.device, [(placed,)], [(cache,)], (operands.placed(table),), step.device
    )
    assert np.isfinite(numpy_of(got)).all()
    with operands.on_cpu():
        rope = paddle.to_tensor(table)
        wanted, _ = reference.layers(
            hidden.plain, [(weights,)], [(plain_cache,)], (rope,), step.plain
        )
    compare(got, wanted, "bfloat16", ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["16 heads", "odd sizes", "128 heads"])
def test_a_decoded_token_does_not_depend_on_a_prompt_beside_it(
    gpu: devices.Device, dtype: str, form: str
) -> None:
    operands, block = Operands(gpu, dtype), FORMS[form]
    with operands.on_cpu():
        weights = weights_of(operands, block)
        placed = on_gpu(operands, weights)
    table = rope_table(RopeSpec(), block.qk_rope_head_dim, POSITIONS, POSITIONS)
    ropes = (operands.placed(table),)
    heads = Heads(block.num_heads, 1, block.latent_size)
    step = Step(operands, [Span(300, 1), Span(70, 40)], heads, 32)
    both = step.arrays
    alone = both._replace(
        **{name: getattr(both, name)[:1] for name in ("token_ids", "positions", "slot_mapping")},
        cu_seqlens_q=both.cu_seqlens_q[:2],
        context_lens=both.context_lens[:1],
        block_tables=both.block_tables[:1],
        logit_indices=both.logit_indices[:1],
        max_lens=np.array([1, 301]),
    )
    values = numpy_of(operands.tensor(step.num_tokens, HIDDEN).plain)
    rows = []
    with library.require().batch_invariant():
        for arrays in (both, alone):
            hidden = operands.both(values[: len(arrays.token_ids)]).device
            inputs = to_tensors(arrays, gpu.place())
            caches = [(step.caches()[1][0],)]
            made, _ = ops.layers(hidden, [(placed,)], caches, ropes, inputs)
            rows.append(numpy_of(made)[0])
    np.testing.assert_array_equal(*rows)
