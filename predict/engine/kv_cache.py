"""The tensors of the paged KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from predict.device.place import place_tensor
from predict.nn.blocks import Linear, Positions, StateTensor
from predict.nn.cache_formats import CacheRows, HeadScales
from predict.nn.inputs import LayerCache, empty_example, to_tensors
from predict.nn.kinds.attention import Attention, AttentionBlock
from predict.nn.spec import DecoderSpec


def allocate_caches(
    spec: DecoderSpec,
    num_blocks: int,
    block_size: int,
    dtype: str,
    kv_format: str = "dense",
    scales: Mapping[int, HeadScales] | None = None,
    num_slots: int = 0,
) -> list[LayerCache]:
    """The cache tensors of each layer (DecoderSpec.kept), as predict.nn.cache_formats has them.

    scales: by layer, for formats with a scale per head. num_slots: of states, [num_slots, ...] of
    each StateTensor of a layer that has some (DecoderSpec.states). Memory is not touched: pages of
    blocks that no request uses cost nothing on a CPU.
    """
    import paddle

    row = spec.cache_format(kv_format)

    def layer(index: int, kept: tuple[CacheRows, ...]) -> LayerCache:
        tensors = row.tensors(kept, num_blocks, block_size, dtype)
        made = [paddle.empty(list(t.shape), t.dtype) for t in tensors]
        if kept and row.scales == "head":
            if scales is None:
                raise ValueError(f"kv_format {kv_format} needs a scale for each head")
            made[len(kept) :] = [paddle.to_tensor(values, "float32") for values in scales[index]]
        return tuple(made)

    def states(layer: Sequence[StateTensor]) -> LayerCache:
        return tuple(paddle.empty([num_slots, *each.shape], each.dtype) for each in layer)

    one = spec.sees_both_ways  # layers take turns with keys and values of a step
    made = [
        states(spec.states[index]) if spec.states[index] else layer(index, kept)
        for index, kept in enumerate(spec.kept[:1] if one else spec.kept)
    ]
    return made * spec.num_layers if one else made


def write_rows(
    backend: ModuleType,
    caches: Sequence[LayerCache],
    rows: npt.NDArray[np.float32],
    slots: npt.NDArray[np.int32],
    kv_format: str,
    dtype: str,
    place: Any,
) -> None:
    """Writes keys and values to slots [T] of all layers' caches, in place, by a step's operator.

    rows: [layers with a cache, 2 (keys, values), heads, T, D], rounded to `dtype` first; keys are
    not rotated. place: of the caches, None on a CPU.
    """
    import paddle

    place = paddle.CPUPlace() if place is None else place
    num_heads, num_tokens, head_dim = rows.shape[2:]
    block = AttentionBlock(num_heads, num_heads, head_dim, 1.0, positions=Positions(kind="none"))
    nothing = cast(Linear, None)  # the operator reads no linear
    attention = Attention(block, nothing, nothing, kv_format=kv_format)
    inputs = to_tensors(
        empty_example()._replace(
            token_ids=np.zeros(num_tokens, np.int32),
            positions=np.zeros(num_tokens, np.int32),
            slot_mapping=slots,
        ),
        place,
    )
    queries = np.zeros((num_tokens, num_heads * head_dim), np.float32)
    for cache, of_layer in zip(filter(None, caches), rows, strict=True):
        keys, values = (each.swapaxes(0, 1).reshape(num_tokens, -1) for each in of_layer)
        qkv = place_tensor(np.concatenate([queries, keys, values], axis=1), dtype, place)
        backend.rope_and_cache_write(qkv, attention, cache, (), inputs)
