"""Latent attention with random weights on the GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from predict.nn.decoder import map_tensors
from predict.nn.kinds.latent_attention import LatentAttention, LatentAttentionBlock
from tests.support.gpu_operands import Operands


def weights_of(
    operands: Operands, block: LatentAttentionBlock, hidden_size: int
) -> LatentAttention:
    return LatentAttention(block, **operands.weights(block, hidden_size))


def on_gpu(operands: Operands, weights: LatentAttention) -> LatentAttention:
    """As the kernels take them: with the first matrix of each head turned, too."""
    keys = weights.kv_b.key_up
    turned = replace(weights.kv_b, key_absorb=keys.transpose([0, 2, 1]).contiguous())

    def placed(path: str, tensor: Any) -> Any:
        return tensor.astype(operands.dtype)._copy_to(operands.gpu.place(), True)

    return map_tensors(replace(weights, kv_b=turned), placed)
