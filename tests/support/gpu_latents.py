"""Latent attention with random weights on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from predict.nn.blocks import HeadSlot, LatentAttentionBlock, LinearSlot, NormSlot
from predict.nn.decoder import HeadMatrices, LatentAttention, NormWeights, map_tensors
from tests.support.gpu_operands import Operands


def weights_of(
    operands: Operands, block: LatentAttentionBlock, hidden_size: int
) -> LatentAttention:
    """Random ones, float32 on the CPU, rounded to the dtype."""

    def norm(size: int) -> NormWeights:
        return NormWeights(operands.tensor(size, around=1.0, scale=0.1).plain)

    slots: dict[str, Any] = {}
    for slot in block.slots(hidden_size):
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
