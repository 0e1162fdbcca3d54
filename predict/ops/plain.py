"""Every operator of `predict.ops.compiled` in plain Paddle.

The tests' oracle, and what runs without a compiled library, and with --inference_model false.
Functions with a twin there are documented there. Activations and sums are float32, whatever the
dtype of weights and caches: Paddle's CPU kernels for 16-bit floats are few.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from predict.device import communicator
from predict.device.place import divided, tensor_at
from predict.nn.blocks import Activation, BlockStep, Function, Norm, NormWeights, Positions
from predict.nn.cache_formats import kv_format_of
from predict.nn.kinds.experts import Router
from predict.ops import composed
from predict.ops.plain_sampling import *  # noqa: F403
from predict.ops.plain_states import delta_net as delta_net
from predict.ops.plain_states import short_conv as short_conv
from predict.schemes import round_on_host, scheme_of

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.blocks import BlockWeights, Linear
    from predict.nn.cache_formats import KvFormat
    from predict.nn.decoder import Embedding, Head, Layer
    from predict.nn.inputs import LayerCache, StepInputs
    from predict.nn.kinds.attention import Attention
    from predict.nn.kinds.experts import Experts
    from predict.nn.kinds.latent_attention import LatentAttention

_OPS = sys.modules[__name__]
LOWEST = -1e30  # in place of -inf, which a program's file has no constant for


def pack_dense(weight: Tensor, dtype: str) -> Tensor:
    return weight.astype(dtype)


def sum_ranks(x: Tensor) -> Tensor:
    values = x.numpy().copy()
    communicator.sum_ranks(values)
    return tensor_at(values, None)


def gather_ranks(x: Tensor, counts: Sequence[int]) -> Tensor:
    parts = communicator.gather_ranks(x.numpy(), len(counts))
    columns = [part[:, :count] for part, count in zip(parts, counts, strict=True)]
    return tensor_at(np.concatenate(columns, axis=-1), None)


def own_rows(token_ids: Tensor, begin: int, end: int, other: int) -> Tensor:
    import paddle

    has = paddle.logical_and(token_ids >= begin, token_ids < end)
    return paddle.where(has, token_ids - begin, paddle.full_like(token_ids, other))


def fold_norm(weight: Tensor, norm: Tensor) -> None:
    product = weight.astype("float32") * norm.astype("float32")
    weight.copy_(product.astype(weight.dtype), True)


def round_weight(
    weight: Tensor, rule: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    codes, scale, zero = round_on_host(weight.numpy(), rule, group_size)
    return (
        tensor_at(codes, None),
        tensor_at(scale, None),
        None if zero is None else tensor_at(zero, None),
    )


def transposed(weight: Tensor) -> Tensor:
    return weight.t().contiguous()


def embedding(token_ids: Tensor, weight: Tensor | None, head: Linear) -> Tensor:
    from paddle.nn import functional

    import paddle

    table = scheme_of(head.scheme).plain(head.tensors) if weight is None else weight
    if table.shape[0] < 0:  # of a traced step, which Paddle's embedding refuses
        return paddle.gather(table, token_ids).astype("float32")
    return functional.embedding(token_ids, table).astype("float32")


def take(x: Tensor, rows: Tensor) -> Tensor:
    import paddle

    return paddle.gather(x, rows)


def take_ids(ids: Tensor, rows: Tensor) -> Tensor:
    return take(ids, rows)


def add(a: Tensor, b: Tensor | None, a_scale: float = 1.0, b_scale: float = 1.0) -> Tensor:
    scaled = a if a_scale == 1.0 else a * a_scale
    if b is None:
        return scaled
    return scaled + (b if b_scale == 1.0 else b * b_scale)


def _normalise(x: Tensor, weights: NormWeights, norm: Norm) -> Tensor:
    """The norm over the last axis, float32."""
    import paddle

    x = x.astype("float32")
    if norm.kind == "layer":
        x = x - paddle.mean(x, axis=-1, keepdim=True)
    variance = paddle.mean(x * x, axis=-1, keepdim=True)
    factor = weights.weight.astype("float32")
    if norm.plus_one:
        factor = factor + 1.0
    out = x * paddle.rsqrt(variance + norm.epsilon) * factor
    return out if weights.bias is None else out + weights.bias.astype("float32")


def norm(x: Tensor, weights: NormWeights, norm: Norm) -> Tensor:
    import paddle

    if len(weights.weight.shape) == 1:
        return _normalise(x, weights, norm).astype(x.dtype)
    num_parts, size = weights.weight.shape
    parts = x.reshape([-1, x.shape[-1] // size, size])
    normed = _normalise(parts[:, :num_parts], weights, norm).astype(x.dtype)
    return paddle.concat([normed, parts[:, num_parts:]], axis=1).flatten(1)


def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    return norm(total, NormWeights(weight), Norm(epsilon=epsilon)), total


def linear(x: Tensor, weights: Linear) -> Tensor:
    return _linear(x, weights).astype(x.dtype)


def _linear(x: Tensor, weights: Linear) -> Tensor:
    out = scheme_of(weights.scheme).product(x.astype("float32"), weights.tensors)
    return out if weights.bias is None else out + weights.bias.astype("float32")


def adapted_linear(x: Tensor, weights: Linear, ids: Tensor, pages: Tensor, row: int) -> Tensor:
    import paddle

    low_rank = weights.low_rank
    assert low_rank is not None
    # Every token is multiplied by all pages, and only those of its adapter count.
    _, parts, ranks, width = low_rank.a.shape
    own = paddle.gather(pages[:, row], paddle.clip(ids, min=0))
    own = paddle.where(ids.unsqueeze(-1) < 0, paddle.full_like(own, -1), own)
    # A traced program takes any number of tokens and of pages.
    numbers = paddle.arange(paddle.shape(low_rank.a)[0], dtype="int32")
    has = (own.unsqueeze(-1) == numbers).astype("float32").sum(axis=1) > 0  # [T, pages]
    a = low_rank.a.astype("float32").reshape([-1, width])
    sums = paddle.matmul(x.astype("float32"), a, transpose_y=True)
    sums = sums.reshape([0, -1, parts, ranks])
    # Chosen and not multiplied: what overflows in another's page is no number times 0.
    sums = paddle.where(has.unsqueeze([-1, -2]), sums, paddle.zeros_like(sums))
    sums = sums.transpose([0, 2, 1, 3]).reshape([0, parts, -1])
    b = low_rank.b.astype("float32").reshape([-1, sum(low_rank.part_sizes)])
    ends = [0, *accumulate(low_rank.part_sizes)]
    columns = [b[:, start:end] for start, end in pairwise(ends)]
    added = [paddle.matmul(sums[:, part], each) for part, each in enumerate(columns)]
    return (_linear(x, weights) + paddle.concat(added, axis=-1)).astype(x.dtype)


def _rotate(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first R dims of x [T, heads, D]; angles [T, R]. See Positions."""
    import paddle

    half = angles.shape[-1] // 2
    cos = angles[:, :half].unsqueeze(1)
    sin = angles[:, half:].unsqueeze(1)
    if interleaved:
        first, second, rest = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2], x[..., 2 * half :]
        pairs = first * cos - second * sin, second * cos + first * sin
        return paddle.concat([paddle.stack(pairs, axis=-1).flatten(-2, -1), rest], axis=-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return paddle.concat([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def _turned(x: Tensor, table: Tensor, places: Positions, inputs: StepInputs) -> Tensor:
    """Rotates x [T, heads, D] by the rows of a table [rows, R] that the step names."""
    import paddle

    angles = paddle.gather(table, inputs.positions)
    if not places.two_dimensional:
        return _rotate(x, angles, places.interleaved)
    size = table.shape[-1]
    again = _rotate(x[..., size:], paddle.gather(table, inputs.block_positions), False)
    return paddle.concat([_rotate(x[..., :size], angles, False), again], axis=-1)


def rope_and_cache_write(
    qkv: Tensor,
    attention: Attention,
    cache: LayerCache,
    ropes: Sequence[Tensor],
    inputs: StepInputs,
) -> tuple[Tensor, list[Tensor]]:
    block = attention.block
    if block.norms_over_ranks:
        qkv = composed.normed_over_ranks(_OPS, qkv, attention)
        attention = replace(attention, q_norm=None, k_norm=None)
    heads, kv_heads, dim = block.num_heads, block.num_kv_heads, block.head_dim
    parts = qkv.astype("float32").reshape([-1, heads + 2 * kv_heads, dim])
    q, k, v = parts[:, :heads], parts[:, heads : heads + kv_heads], parts[:, heads + kv_heads :]

    def normed(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if attention.q_norm is None or attention.k_norm is None:
            return q, k
        assert block.qk_norm is not None
        if block.qk_norm_whole:
            q, k = q.flatten(1), k.flatten(1)
        q = _normalise(q, attention.q_norm, block.qk_norm).reshape([-1, heads, dim])
        return q, _normalise(k, attention.k_norm, block.qk_norm).reshape([-1, kv_heads, dim])

    if not block.qk_norm_last:
        q, k = normed(q, k)
    places = block.positions
    if places.kind == "rotary":
        q_table = places.table if places.query_table < 0 else places.query_table
        q = _turned(q, ropes[q_table], places, inputs)
        k = _turned(k, ropes[places.table], places, inputs)
    if block.qk_norm_last:
        q, k = normed(q, k)
    q = q.reshape([-1, heads * dim]).astype(qkv.dtype)
    return q, _write((k, v), cache, [kv_format_of(attention.kv_format)] * 2, inputs)


def _write(
    new: Sequence[Tensor], cache: LayerCache, formats: Sequence[KvFormat], inputs: StepInputs
) -> list[Tensor]:
    """Puts rows [T, heads, D] of each kind into the cache, in place, and returns its tensors.

    formats: of each kind; those with scales come first.
    """
    import paddle

    keep = paddle.nonzero(inputs.slot_mapping >= 0).reshape([-1])
    slots = paddle.gather(inputs.slot_mapping, keep).astype("int64")
    written, of_scales = [], []
    for which, (made, kv_format) in enumerate(zip(new, formats, strict=True)):
        num_heads, block_size = cache[which].shape[1:3]
        indices = (
            (slots // block_size).unsqueeze(1),
            paddle.arange(num_heads, dtype="int64").unsqueeze(0),
            (slots % block_size).unsqueeze(1),
        )
        scales = None if kv_format.scales == "none" else cache[len(new) + which]
        given = scales if kv_format.scales == "head" else None
        codes, own = kv_format.quantize(paddle.gather(made, keep), given)
        written.append(paddle.index_put_(cache[which], indices, codes.astype(cache[which].dtype)))
        if scales is not None:
            per_token = kv_format.scales == "token"
            of_scales.append(paddle.index_put_(scales, indices, own) if per_token else scales)
    return written + of_scales


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    import paddle

    source, target = paddle.to_tensor(np.array(copies, np.int64)).unbind(axis=1)
    for cache in caches:
        paddle.index_put_(cache, (target,), cache[source])


def _capped(x: Tensor, softcap: float) -> Tensor:
    import paddle

    return paddle.tanh(divided(x, softcap)) * softcap if softcap else x


def _bits(words: Tensor) -> Tensor:
    """int32 0 or 1 [T, 32 * words] of int32 [T, words], the lowest bit of word 0 first."""
    import paddle

    powers = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.int32)
    ones = paddle.bitwise_and(words.unsqueeze(-1), paddle.to_tensor(powers))
    return (ones != 0).astype("int32").flatten(-2, -1)


def paged_attention(
    q: Tensor,
    attention: Attention,
    cache: LayerCache,
    inputs: StepInputs,
    tree_mask: Tensor | None = None,
) -> Tensor:
    block = attention.block
    if block.prefix_mask and tree_mask is not None:
        raise ValueError("tree_mask and prefix_lens do not go together")
    heads = _Heads(
        block.num_heads,
        block.num_kv_heads,
        block.softmax_scale,
        block.window,
        block.softcap,
        attention.slopes,
        block.prefix_mask,
        attention.sinks,
    )
    kv_format = kv_format_of(attention.kv_format)
    keys, values = (
        _context(cache, which, 2, kv_format, block.head_dim, inputs) for which in (0, 1)
    )
    return _attend(q, heads, keys, values, inputs, tree_mask)


class _Heads(NamedTuple):
    """How `_attend` computes scores; fields as in AttentionBlock."""

    num_heads: int
    num_kv_heads: int
    softmax_scale: float
    window: int = -1
    softcap: float = 0.0
    slopes: Tensor | None = None
    prefix_mask: bool = False
    sinks: Tensor | None = None


def _context(
    cache: LayerCache,
    which: int,
    num_kinds: int,
    kv_format: KvFormat,
    size: int,
    inputs: StepInputs,
) -> Tensor:
    """Rows [B, heads, 1, S, size] of every request's context, padded to the longest.

    which: of the num_kinds kinds of rows that the cache keeps.
    """
    import paddle

    num_heads, block_size = cache[which].shape[1:3]
    # Tensor arithmetic, not Python's, so that the same lines also trace into a program.
    num_blocks = (inputs.max_lens[1] + (block_size - 1)) // block_size
    tables = paddle.clip(inputs.block_tables[:, :num_blocks], min=0)  # [B, blocks]

    def blocks(pool: Tensor) -> Tensor:
        # Paddle's CPU gather does not take float16; the whole pool is cast, however large it is.
        pool = pool.astype("float32") if pool.dtype == paddle.float16 else pool
        return paddle.gather(pool, tables.reshape([-1]))

    scales = None
    if kv_format.scales == "token":
        scales = blocks(cache[num_kinds + which])
    elif kv_format.scales == "head":
        scales = cache[num_kinds + which].unsqueeze(-1)
    rows = kv_format.unpack(blocks(cache[which]), scales, size)
    shape = paddle.shape(tables)
    by_seq = rows.reshape([shape[0], shape[1], num_heads, block_size, size])
    return by_seq.transpose([0, 2, 1, 3, 4]).reshape([0, num_heads, 1, -1, size])


def _attend(
    q: Tensor,
    shape_of: _Heads,
    keys: Tensor,
    values: Tensor,
    inputs: StepInputs,
    tree_mask: Tensor | None,
) -> Tensor:
    """Attention of queries [T, num_heads * D] over keys and values of every request's context.

    keys [B, num_kv_heads, 1, S, D], values [B, num_kv_heads, 1, S, V]; S whole blocks, at least the
    longest context. Spans are padded to the longest: simple, and large. Returns [T, num_heads * V].
    """
    from paddle.nn import functional

    import paddle

    heads, kv_heads = shape_of.num_heads, shape_of.num_kv_heads
    dim, value_dim = keys.shape[-1], values.shape[-1]
    longest_span = inputs.max_lens[0]
    starts, ends = inputs.cu_seqlens_q[:-1], inputs.cu_seqlens_q[1:]
    lengths = ends - starts  # [B]
    row = paddle.arange(longest_span, dtype="int32")
    span_rows = paddle.minimum(starts.unsqueeze(1) + row, ends[-1:] - 1)
    shape = paddle.shape(span_rows)  # B, span
    padded = paddle.gather(q, span_rows.reshape([-1])).astype("float32")  # [B * span, heads * D]
    padded = padded.reshape([shape[0], shape[1], kv_heads, heads // kv_heads, dim])
    padded = padded.transpose([0, 2, 3, 1, 4])  # [B, kv_heads, group, span, D]

    first = (inputs.context_lens - lengths).unsqueeze(1)  # [B, 1] position of a span's token 0
    column = paddle.arange(paddle.shape(keys)[3], dtype="int32")
    if tree_mask is None:
        position = first + row  # [B, span]
        last = position
        if shape_of.prefix_mask:
            reach = inputs.prefix_lens.unsqueeze(1) - 1
            if shape_of.window >= 0:
                reach = paddle.minimum(reach, position + (shape_of.window - 1))
            last = paddle.maximum(last, reach)
        visible = column <= last.unsqueeze(2)  # [B, span, S]
    else:
        seen = paddle.gather(_bits(tree_mask), span_rows.reshape([-1]))  # [B * span, bits]
        seen = seen.reshape([shape[0], shape[1], -1])
        bits = seen.shape[-1]
        tree = (lengths <= bits).unsqueeze(1)  # [B, 1] longer spans are no trees
        depth = paddle.where(tree, seen.sum(axis=-1).astype("int32") - 1, row + first * 0)
        position = first + depth
        index = (column - first).unsqueeze(1) + 0 * row.unsqueeze(1)  # [B, span, S] in the span
        own = paddle.take_along_axis(seen, paddle.clip(index, 0, bits - 1), axis=2) > 0
        own = paddle.where(index < 0, paddle.ones_like(own), paddle.logical_and(own, index < bits))
        visible = paddle.where(tree.unsqueeze(2), own, index <= row.unsqueeze(1))
    if shape_of.window >= 0:
        visible = paddle.logical_and(visible, column > position.unsqueeze(2) - shape_of.window)
    # Slots that nobody wrote may hold NaN, which 0 * NaN would let through.
    written = (column < inputs.context_lens.unsqueeze(1)).unsqueeze(1).unsqueeze(1).unsqueeze(4)
    values = paddle.where(written, values, paddle.zeros_like(values))

    scores = paddle.matmul(padded, keys, transpose_y=True) * shape_of.softmax_scale
    scores = _capped(scores, shape_of.softcap)
    if shape_of.slopes is not None:
        stands = paddle.gather(inputs.positions, span_rows.reshape([-1])).reshape([shape[0], -1])
        distance = (column - stands.unsqueeze(2)).astype("float32")  # [B, span, S]
        bias = shape_of.slopes.reshape([1, kv_heads, heads // kv_heads, 1, 1])
        scores = scores + bias * distance.unsqueeze(1).unsqueeze(1)
    scores = paddle.where(
        visible.unsqueeze(1).unsqueeze(1), scores, paddle.full_like(scores, LOWEST)
    )
    weights = functional.softmax(scores, axis=-1)
    if shape_of.sinks is not None:
        sinks = shape_of.sinks.reshape([1, kv_heads, heads // kv_heads, 1, 1])
        highest = paddle.max(scores, axis=-1, keepdim=True)
        total = paddle.sum(paddle.exp(scores - highest), axis=-1, keepdim=True)
        weights = weights * (total / (total + paddle.exp(sinks - highest)))
    out = paddle.matmul(weights, values).transpose([0, 3, 1, 2, 4])
    used = paddle.nonzero((row < lengths.unsqueeze(1)).reshape([-1])).reshape([-1])
    return paddle.gather(out.reshape([-1, heads * value_dim]), used).astype(q.dtype)


def split(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The columns of x [T, N] up to the last `size`, and those."""
    return x[:, :-size], x[:, -size:]


def turn_and_keep_latents(
    q: Tensor,
    latents: Tensor,
    attention: LatentAttention,
    cache: LayerCache,
    ropes: Sequence[Tensor],
    inputs: StepInputs,
) -> tuple[Tensor, list[Tensor]]:
    """Rotates queries, norms and rotates latents, and writes these to their slots.

    q [T, heads * (N + R)], latents [T, L + R]: see LatentAttentionBlock. Returns
    q and the cache, which is modified in place.
    """
    import paddle

    block = attention.block
    own, rank = block.qk_nope_head_dim, block.kv_lora_rank
    table = ropes[block.positions.table]
    parts = q.astype("float32").reshape([-1, block.num_heads, own + block.qk_rope_head_dim])
    turned = _turned(parts[..., own:], table, block.positions, inputs)
    row = latents.astype("float32")
    kept = _normalise(row[:, :rank], attention.kv_a_norm, block.kv_a_norm)
    shared = _turned(row[:, rank:].unsqueeze(1), table, block.positions, inputs)
    row = paddle.concat([kept.unsqueeze(1), shared], axis=-1)
    q = paddle.concat([parts[..., :own], turned], axis=-1).flatten(1).astype(q.dtype)
    kinds = kv_format_of(attention.kv_format, block.kv_formats).kinds(block.cache_rows)
    ends = list(accumulate(rows.size for rows, _ in kinds))
    new = [row[..., begin:end] for begin, end in pairwise([0, *ends])]
    return q, _write(new, cache, [each for _, each in kinds], inputs)


def latent_attention(
    q: Tensor,
    attention: LatentAttention,
    cache: LayerCache,
    inputs: StepInputs,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """Causal attention of queries [T, heads * (N + R)] over latents. Returns [T, heads * V].

    In the form that the block says; the cheaper one is taken to be the absorbed.
    """
    import paddle

    block = attention.block
    heads, rank, own = block.num_heads, block.kv_lora_rank, block.qk_nope_head_dim
    kinds = kv_format_of(attention.kv_format, block.kv_formats).kinds(block.cache_rows)
    contexts = [
        _context(cache, which, len(kinds), each, rows.size, inputs)
        for which, (rows, each) in enumerate(kinds)
    ]
    latents = paddle.concat(contexts, axis=-1)
    key_up = attention.kv_b.key_up.astype("float32")
    value_up = attention.kv_b.value_up.astype("float32")
    if block.form == "expanded":
        made = latents[:, 0, 0, :, :rank]  # [B, S, L]
        keys, values = (_of_heads(made, matrices) for matrices in (key_up, value_up))
        shared = latents[..., rank:] + paddle.zeros([1, heads, 1, 1, 1])
        keys = paddle.concat([keys, shared], axis=-1)
        of_heads = _Heads(heads, heads, block.softmax_scale)
        return _attend(q, of_heads, keys, values, inputs, tree_mask)
    parts = q.astype("float32").reshape([-1, heads, own + block.qk_rope_head_dim])
    absorbed = paddle.matmul(parts[..., :own].transpose([1, 0, 2]), key_up).transpose([1, 0, 2])
    queries = paddle.concat([absorbed, parts[..., own:]], axis=-1).flatten(1)
    of_heads = _Heads(heads, 1, block.softmax_scale)
    mixed = _attend(queries, of_heads, latents, latents[..., :rank], inputs, tree_mask)
    mixed = mixed.reshape([-1, heads, rank]).transpose([1, 0, 2])
    out = paddle.matmul(mixed, value_up, transpose_y=True).transpose([1, 0, 2])
    return out.flatten(1).astype(q.dtype)


def _of_heads(made: Tensor, matrices: Tensor) -> Tensor:
    """Products of latents [B, S, L] and each head's matrix [heads, N, L]: [B, heads, 1, S, N].

    One product, since Paddle's programs infer a wrong shape for a broadcast batch of products.
    """
    import paddle

    heads, size, _ = matrices.shape
    parts = paddle.matmul(made, matrices.flatten(0, 1), transpose_y=True)
    return parts.reshape([0, 0, heads, size]).transpose([0, 2, 1, 3]).unsqueeze(2)


def activate(x: Tensor, activation: Activation) -> Tensor:
    import paddle

    gate = up = x.astype("float32")
    if not activation.gated:
        return _function(gate, activation.function).astype(x.dtype)
    gate, up = paddle.split(up, 2, axis=-1)
    if activation.clamp:
        gate = paddle.clip(gate, max=activation.clamp)
        up = paddle.clip(up, -activation.clamp, activation.clamp)
    if activation.slope != 1.0:
        gate = gate * paddle.nn.functional.sigmoid(gate * activation.slope)
    else:
        gate = _function(gate, activation.function)
    return (gate * (up + activation.up_offset if activation.up_offset else up)).astype(x.dtype)


def _function(x: Tensor, name: Function) -> Tensor:
    import paddle

    if name == "silu":
        return paddle.nn.functional.silu(x)
    if name == "gelu":
        return 0.5 * x * (1.0 + paddle.erf(x * math.sqrt(0.5)))
    if name == "gelu_tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + paddle.tanh(inner))
    positive = paddle.clip(x, min=0.0)
    return positive * positive if name == "relu_squared" else positive


def block(
    hidden: Tensor, weights: BlockWeights, step: BlockStep = BlockStep()
) -> tuple[Tensor, list[Tensor]]:
    return weights.run(_OPS, hidden, step)


def route(x: Tensor, weights: Experts) -> tuple[Tensor, Tensor]:
    """The experts [T, top_k] int32 of each row of x [T, H], and their weights [T, top_k] float32.

    See Router. A row with a NaN goes to experts 0, 1, ... with weights of NaN.
    """
    import paddle

    router = weights.block.router
    logits = paddle.matmul(x.astype("float32"), weights.router.astype("float32"), transpose_y=True)
    if weights.router_bias is not None:
        logits = logits + weights.router_bias
    if router.scoring == "softmax":
        scores = paddle.nn.functional.softmax(logits, axis=-1)
    elif router.scoring == "sparse_mixer":
        scores = logits
    else:
        scores = paddle.nn.functional.sigmoid(logits)
    # 0, or NaN where the row has one: a program's file has no NaN for a constant.
    zeros = paddle.zeros_like(logits)
    broken = paddle.where(paddle.isnan(logits), logits, zeros).sum(axis=-1, keepdim=True)
    choice = scores if weights.correction is None else scores + weights.correction
    choice = paddle.where(paddle.isnan(broken), zeros, choice)
    if router.top_groups < router.num_groups:
        choice = _in_groups(choice, router)
    # A stable sort: of equal ones the lower expert first, which top-k does not promise.
    chosen = paddle.argsort(choice, axis=-1, descending=True, stable=True)[:, : router.top_k]
    shares = paddle.take_along_axis(scores, chosen, axis=-1)
    if router.scoring == "sparse_mixer":
        shares = _mixer_shares(logits, chosen, shares, router)
    if router.renormalize:
        shares = shares / paddle.sum(shares, axis=-1, keepdim=True)
    return chosen.astype("int32"), shares * router.scale + broken


def _mixer_shares(logits: Tensor, chosen: Tensor, best: Tensor, router: Router) -> Tensor:
    """The weights [T, top_k] of the chosen experts, whose logits are `best`: see Router."""
    import paddle

    ids = paddle.arange(router.num_experts, dtype=chosen.dtype)
    none, shares = paddle.full_like(logits, LOWEST), []
    for place in range(router.top_k):
        most = best[:, place : place + 1]
        gap = (most - logits) / paddle.maximum(paddle.abs(logits), most)
        left_out = gap > 2 * router.jitter
        for ahead in range(place):
            left_out = left_out | (ids == chosen[:, ahead : ahead + 1])
        kept = paddle.where(left_out, none, logits)
        shares.append(1 / paddle.exp(kept - most).sum(axis=-1))
    return paddle.stack(shares, axis=-1)


def _in_groups(choice: Tensor, router: Router) -> Tensor:
    """`choice` [T, E], below all else but for the experts of the chosen groups."""
    import paddle

    grouped = choice.reshape([-1, router.num_groups, router.num_experts // router.num_groups])
    count = 2 if router.group_score == "top_two" else 1
    best = paddle.topk(grouped, count, axis=-1)[0].sum(axis=-1)  # [T, groups]
    order = paddle.argsort(best, axis=-1, descending=True, stable=True)
    rank = paddle.argsort(order, axis=-1, stable=True).unsqueeze(-1)
    out = paddle.where(rank < router.top_groups, grouped, paddle.full_like(grouped, LOWEST))
    return out.flatten(1)


def experts(x: Tensor, ids: Tensor, shares: Tensor, weights: Experts) -> Tensor:
    """Each row's experts' MLPs of x [T, H], times their shares, in float32. Returns [T, H].

    ids, shares [T, top_k]: of `route`.
    """
    import paddle

    # Every expert gets all rows, of which its own count: which they are a traced program cannot
    # know. In float32 up to the sum, as the compiled operators have it.
    rows = x.astype("float32")
    total = paddle.zeros_like(rows)
    gate_up, down = map(_with_experts_apart, (weights.gate_up, weights.down))
    for number in range(weights.block.num_experts):
        own = ids == weights.block.first_expert + number
        share = paddle.where(own, shares, paddle.zeros_like(shares)).sum(axis=-1)
        share = share.unsqueeze(-1)
        inner = activate(linear(x, _expert(gate_up, number)), weights.block.activation)
        made = _linear(inner, _expert(down, number)) * share
        total = total + paddle.where(share != 0.0, made, paddle.zeros_like(made))
    return total.astype(x.dtype)


def _with_experts_apart(linear: Linear) -> Linear:
    """The linear as `_expert` can cut it: of e4m3 Paddle's programs cut nothing, of floats they do.

    Their values are the same.
    """
    import paddle

    if paddle.in_dynamic_mode():
        return linear
    codes, *others = linear.tensors
    if codes.dtype == paddle.float8_e4m3fn:
        codes = codes.astype("float32")
    return replace(linear, tensors=(codes, *others))


def _expert(linear: Linear, number: int) -> Linear:
    bias = None if linear.bias is None else linear.bias[number]
    return replace(
        linear, tensors=tuple(part[number] for part in linear.tensors), bias=bias, num_experts=0
    )


def gate(x: Tensor, by: Tensor, weight: Tensor) -> Tensor:
    """X [T, N] times sigmoid of `by` [T, H] . weight [1, H]."""
    import paddle

    logits = paddle.matmul(by.astype("float32"), weight.astype("float32"), transpose_y=True)
    return (x.astype("float32") * paddle.nn.functional.sigmoid(logits)).astype(x.dtype)


def layers(
    hidden: Tensor,
    layers: Sequence[Layer],
    caches: Sequence[LayerCache],
    ropes: Sequence[Tensor],
    inputs: StepInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    runs = composed.layer_runs(_OPS, zip(layers, caches, strict=True), ropes)
    return composed.in_turn(_OPS, runs, hidden, inputs, tree_mask, rows)


class BoundLayers(composed.BoundLayers):
    """`layers` for tensors that stay the same."""

    ops = _OPS


def cut_patches(
    pixels: Tensor,
    origins: Tensor,
    strides: Tensor,
    sizes: tuple[int, int],
    scaling: tuple[float, Sequence[float], Sequence[float]],
    dtype: str,
) -> Tensor:
    import paddle

    (side, width), (factor, mean, std) = sizes, scaling
    y, x, c = (axis.reshape(-1) for axis in np.indices((side, side, 3)))
    steps = 3 * (y * strides.numpy().astype(np.int64)[:, None] + x) + c
    values = pixels.numpy()[origins.numpy()[:, None] + steps].astype(np.float32)
    values = values.reshape(-1, side * side, 3) * np.float32(factor)
    values = (values - np.array(mean, np.float32)) / np.array(std, np.float32)
    made = np.zeros((len(values), width), np.float32)
    made[:, : 3 * side * side] = values.transpose(0, 2, 1).reshape(len(values), -1)
    return paddle.to_tensor(made, place=pixels.place).astype(dtype)


def put_rows(table: Tensor, rows: Tensor, x: Tensor) -> None:
    import paddle

    # Paddle scatters no 16-bit types on a CPU, and the plain operators compute in float32.
    paddle.scatter_(table, rows, x)


def write_places(table: Tensor, places: Tensor, axes: Sequence[int], first: int) -> Tensor:
    import paddle

    axis_of = paddle.to_tensor([*axes, *axes], dtype="int32")
    rows = paddle.gather(table, places[:, 0])
    for axis in sorted({*axes} - {0}):
        own = paddle.gather(table, places[:, axis])
        rows = paddle.where((axis_of == axis).expand_as(rows), own, rows)
    if not paddle.in_dynamic_mode():  # a program has no part of a tensor that is written to
        return paddle.concat([table[:first], rows])
    paddle.assign(rows, table._slice(first, first + places.shape[0]))
    return table


def embed(inputs: StepInputs, embedding: Embedding, head: Linear) -> Tensor:
    return composed.embed(_OPS, inputs, embedding, head)


def take_or(x: Tensor, rows: Tensor, other: Tensor) -> Tensor:
    return composed.with_images(_OPS, other.astype(x.dtype), x, rows)


def add_images(hidden: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    import paddle

    return hidden + take_or(table, rows, paddle.zeros([1, hidden.shape[1]], hidden.dtype))


def kept_layers() -> Callable[..., tuple[Tensor, list[Tensor]]]:
    return layers


def before_head(hidden: Tensor, head: Head) -> Tensor:
    return composed.before_head(_OPS, hidden, head)


def logits(hidden: Tensor, head: Head, logit_indices: Tensor | None = None) -> Tensor:
    rows = hidden if logit_indices is None else take(hidden, logit_indices)
    x = composed.before_head(_OPS, rows, head)
    out = _linear(x, head.linear)
    if head.spec.scale != 1.0:
        out = out * head.spec.scale
    return composed.of_all_tokens(_OPS, _capped(out, head.spec.softcap), head.share)
