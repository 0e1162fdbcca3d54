"""Latent attention blocks with random weights, for both backends, over caches with a past."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from predict.nn.blocks import (
    HeadMatrices,
    HeadSlot,
    Linear,
    LinearSlot,
    Norm,
    NormSlot,
    NormWeights,
    Positions,
)
from predict.nn.cache_formats import LATENT_FORMATS, kv_format_of
from predict.nn.kinds.latent_attention import LatentAttention, LatentAttentionBlock, LatentForm
from predict.nn.rope import rope_table
from predict.nn.spec import RopeSpec
from predict.ops import compiled as ops
from tests.support.attention import Batch, Shape
from tests.support.cpu_kernels import Array, normal, numpy32, tensor

RMS = Norm(epsilon=1e-6)


def block_of(
    num_heads: int,
    sizes: tuple[int, int, int, int],
    q_lora_rank: int = 0,
    interleaved: bool = True,
    **fields: Any,
) -> LatentAttentionBlock:
    """sizes: kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim."""
    return LatentAttentionBlock(
        num_heads,
        *sizes,
        softmax_scale=(sizes[1] + sizes[2]) ** -0.5,
        q_lora_rank=q_lora_rank,
        q_a_norm=RMS if q_lora_rank else None,
        positions=Positions(interleaved=interleaved),
        **fields,
    )


@dataclass(frozen=True)
class Latents:
    """A block and its weights as plain operators read them, rounded to `dtype`."""

    block: LatentAttentionBlock
    dtype: str
    hidden_size: int
    weights: LatentAttention

    @classmethod
    def of(
        cls, block: LatentAttentionBlock, dtype: str, hidden_size: int, seed: int = 3
    ) -> Latents:
        rng = np.random.default_rng(seed)
        slots: dict[str, Any] = {}
        for slot in block.slots(hidden_size):
            if isinstance(slot, LinearSlot):
                weight = normal(rng, slot.out_features, slot.in_features)
                bias = normal(rng, slot.out_features) * 0.1 if slot.has_bias else None
                slots[slot.name] = Linear(
                    "dense",
                    (tensor(weight * slot.in_features**-0.5, dtype),),
                    None if bias is None else tensor(bias, dtype),
                    slot.in_features,
                    slot.out_features,
                )
            elif isinstance(slot, HeadSlot):
                scale = slot.in_features**-0.5
                slots[slot.name] = HeadMatrices(
                    *(
                        tensor(normal(rng, slot.num_heads, rows, slot.in_features) * scale, dtype)
                        for rows in slot.part_sizes
                    )
                )
            elif isinstance(slot, NormSlot):
                slots[slot.name] = NormWeights(tensor(1 + 0.1 * normal(rng, slot.size), dtype))
        return cls(block, dtype, hidden_size, LatentAttention(block, **slots))

    def in_form(self, form: LatentForm) -> Latents:
        block = replace(self.block, form=form)
        return replace(self, block=block, weights=replace(self.weights, block=block))

    def in_format(self, kv_format: str) -> Latents:
        return replace(self, weights=replace(self.weights, kv_format=kv_format))

    def packed(self) -> LatentAttention:
        """The weights as the CPU's operators read them."""
        w = self.weights

        def linear(plain: Linear) -> Linear:
            return replace(plain, tensors=(ops.pack_dense(plain.tensors[0], self.dtype),))

        def heads(matrices: Any) -> Any:
            import paddle

            return paddle.stack(
                [ops.pack_dense(tensor(one, self.dtype), self.dtype) for one in matrices]
            )

        keys, values = numpy32(w.kv_b.key_up), numpy32(w.kv_b.value_up)
        kv_b = HeadMatrices(heads(keys), heads(values), heads(keys.transpose(0, 2, 1)))
        return replace(
            w,
            qkv_a=linear(w.qkv_a),
            q_b=None if w.q_b is None else linear(w.q_b),
            kv_b=kv_b,
            out=linear(w.out),
        )

    def ropes(self, num_positions: int) -> list[Any]:
        size = self.block.qk_rope_head_dim
        return [tensor(rope_table(RopeSpec(), size, num_positions, num_positions), "float32")]


def coded_pool(pool: Array, latents: LatentAttention, dtype: str) -> tuple[Any, ...]:
    """A pool [N, 1, S, L + R] as codes, tails and scales.

    What nobody wrote, NaN, holds any code and scales that would spread.
    """
    rank = latents.block.kv_lora_rank
    written = ~np.isnan(pool[..., 0])
    rows = tensor(np.nan_to_num(pool[..., :rank]), "float32")
    codes, scale = kv_format_of(latents.kv_format, LATENT_FORMATS).quantize(rows, None)
    assert scale is not None
    noise = np.random.default_rng(3).integers(0, 256, codes.shape).astype(np.uint8)
    return (
        tensor(np.where(written[..., None], codes.numpy(), noise), "uint8"),
        tensor(pool[..., rank:], dtype),
        tensor(np.where(written, scale.numpy(), np.nan), "float32"),
    )


def rows_of_cache(cache: Sequence[Any], latents: LatentAttention) -> Array:
    """float32 [N, 1, S, L + R] of a layer's cache, which is on the CPU."""
    row, *others = cache
    if latents.kv_format == "dense":
        return numpy32(row)
    kv_format = kv_format_of(latents.kv_format, LATENT_FORMATS)
    values = kv_format.unpack(row, others[1], latents.block.kv_lora_rank)
    return np.concatenate([numpy32(values), numpy32(others[0])], axis=-1)


def check_codes(got: Array, wanted: Array, share: float) -> None:
    """Rows [T, L] of codes: at most that share of them beside the wanted code, none further off."""
    size = np.abs(wanted).max(axis=-1, keepdims=True)
    apart = np.abs(got - wanted) / size
    assert apart.max() <= 1.05 * 32 / 448  # between the two largest codes
    assert np.mean(apart > 4e-3) <= share


@dataclass(frozen=True)
class LatentBatch:
    """A step over a cache with the latents before it; slots of nobody hold NaN."""

    batch: Batch
    past: list[Array]  # [context, 1, L + R] of each request, the step's own to be written

    @classmethod
    def of(
        cls, block: LatentAttentionBlock, spans: tuple[tuple[int, int], ...], block_size: int
    ) -> LatentBatch:
        shape = Shape(block.num_heads, 1, block.latent_size, block_size, spans)
        rng = np.random.default_rng(11)
        past = [normal(rng, context, 1, block.latent_size) for _, context in spans]
        return cls(Batch.of(shape), past)

    def cache(self, dtype: str, latents: Latents | None = None) -> tuple[Any, ...]:
        """What requests kept before the step, in the format of these latents; default dense."""
        spans = self.batch.shape.spans
        kept = [rows[: len(rows) - new] for rows, (new, _) in zip(self.past, spans, strict=True)]
        pool = self.batch.filled_cache(kept)
        if latents is None or latents.weights.kv_format == "dense":
            return (tensor(pool, dtype),)
        return coded_pool(pool, latents.weights, dtype)

    @property
    def longest(self) -> int:
        return max(context for _, context in self.batch.shape.spans)
