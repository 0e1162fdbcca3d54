"""The tensors of the paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from predict.nn.cache_formats import HeadScales, kv_format_of
from predict.nn.inputs import LayerCache
from predict.nn.spec import DecoderSpec


def allocate_caches(
    spec: DecoderSpec,
    num_blocks: int,
    block_size: int,
    dtype: str,
    kv_format: str = "dense",
    scales: Sequence[HeadScales] | None = None,
) -> list[LayerCache]:
    """The cache tensors of each layer, as predict.nn.cache_formats has them.

    scales: of each layer, for formats with a scale per head. Memory is not touched: pages of blocks
    that no request uses cost nothing on a CPU.
    """
    import paddle

    row = kv_format_of(kv_format)

    def layer(index: int) -> LayerCache:
        kept = spec.attention[index].cache_rows
        tensors = row.tensors(kept, num_blocks, block_size, dtype)
        made = [paddle.empty(list(t.shape), t.dtype) for t in tensors]
        if row.scales == "head":
            if scales is None:
                raise ValueError(f"kv_format {kv_format} needs a scale for each head")
            made[len(kept) :] = [paddle.to_tensor(values, "float32") for values in scales[index]]
        return tuple(made)

    return [layer(index) for index in range(len(spec.attention))]
