"""The operators that predict.bench.kernels times on the CPU: cases and sizes.

A case calls one operator on operands of a real model's shape. Weights and caches rotate through
many copies, so that they come from memory, as in a model of many layers, and not from the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from predict.nn.blocks import FUNCTIONS, Activation, Norm
from predict.nn.cache_formats import CacheTensor, KvFormat, key_value_rows, kv_format_of
from predict.nn.inputs import StepInputs, max_lens_of
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.mlp import MlpBlock
from predict.ops.records import text_of

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per value
BLOCK_SIZE = 64  # tokens
DECODE_TOKENS = 64  # up to so many are one each of as many sequences; more are one prompt
COLD_BYTES = 192 << 20  # operands rotate through at least this much memory
MAX_COPIES = 64


@dataclass(frozen=True)
class ModelShape:
    """The sizes that an operator's operands depend on."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    @property
    def qkv_size(self) -> int:
        """Outputs of the joint query, key and value projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def attention_size(self) -> int:
        """Inputs of the output projection."""
        return self.num_heads * self.head_dim


# The small vocabularies are cut to 32,000 rows: a larger head has the same speed and takes longer.
SHAPES = {
    "qwen2.5-0.5b": ModelShape(896, 4864, 14, 2, 64, 32000),
    "llama-1b": ModelShape(2048, 8192, 32, 8, 64, 32000),
    "llama-8b": ModelShape(4096, 14336, 32, 8, 128, 128256),
}


@dataclass(frozen=True)
class OperatorCase:
    """One operator on one set of sizes."""

    op: str  # without the "regatta_" in front
    name: str  # sizes, for the reader
    copies: Sequence[tuple[Any, ...]]  # arguments; rotated
    num_bytes: float  # that must be read and written
    num_flops: float


def _full(shape: Sequence[int], dtype: str, value: float = 0.01) -> Any:
    """A tensor whose memory is touched; values do not matter, except that none is denormal."""
    import paddle

    return paddle.full(list(shape), value, dtype)


def _cache(tensor: CacheTensor) -> Any:
    """A tensor of a layer's cache; no code is a NaN of float8, and scales are above 0."""
    return _full(tensor.shape, tensor.dtype, 0x35 if tensor.dtype == "uint8" else 0.01)


def _int32(values: Any) -> Any:
    import paddle

    return paddle.to_tensor(np.asarray(values, np.int32))


@dataclass(frozen=True)
class Sizes:
    """What a case is built for."""

    shape: ModelShape
    num_tokens: int
    context_len: int
    dtype: str
    kv_formats: tuple[str, ...] = ("dense",)

    @property
    def is_decode(self) -> bool:
        """Whether the tokens are one each of as many sequences."""
        return self.num_tokens <= DECODE_TOKENS

    @property
    def value_bytes(self) -> int:
        """Bytes of one activation or weight."""
        return DTYPES[self.dtype]

    def full(self, *shape: int) -> Any:
        """A tensor of the dtype; see _full."""
        return _full(shape, self.dtype)

    def weight(self, num_inputs: int, num_outputs: int) -> Any:
        """A packed dense weight."""
        panels = -(-num_outputs // 32)
        if self.dtype == "bfloat16":
            return self.full(panels, -(-num_inputs // 2), 32, 2)
        return self.full(panels, num_inputs, 32)

    def num_copies(self, num_bytes: float) -> int:
        """Copies of an operand of `num_bytes` that together do not fit any cache."""
        return max(2, min(MAX_COPIES, int(COLD_BYTES // num_bytes) + 1))


def linear_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """The four projections of a layer and the head."""
    shape = sizes.shape
    for part, num_inputs, num_outputs in (
        ("qkv", shape.hidden_size, shape.qkv_size),
        ("out", shape.attention_size, shape.hidden_size),
        ("gate_up", shape.hidden_size, 2 * shape.intermediate_size),
        ("down", shape.intermediate_size, shape.hidden_size),
        ("head", shape.hidden_size, shape.vocab_size),
    ):
        size, x = num_inputs * num_outputs, sizes.full(sizes.num_tokens, num_inputs)
        num_copies = sizes.num_copies(size * sizes.value_bytes)
        weights = [sizes.weight(num_inputs, num_outputs) for _ in range(num_copies)]
        copies = [(x, [weight], None, "dense", num_outputs) for weight in weights]
        moved = (size + sizes.num_tokens * (num_inputs + num_outputs)) * sizes.value_bytes
        name = f"{part} {num_inputs} x {num_outputs}"
        yield OperatorCase("linear", name, copies, moved, 2.0 * sizes.num_tokens * size)


def mlp_block_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """Norm, gate and up, activation, down, residual."""
    hidden, inner = sizes.shape.hidden_size, sizes.shape.intermediate_size
    weight_bytes = 3 * hidden * inner * sizes.value_bytes
    text = text_of(MlpBlock(inner, norm=Norm(epsilon=1e-6)), gate_up="dense", down="dense")
    x = sizes.full(sizes.num_tokens, hidden)

    def weights() -> list[Any]:
        return [sizes.full(hidden), sizes.weight(hidden, 2 * inner), sizes.weight(inner, hidden)]

    number = range(sizes.num_copies(weight_bytes))
    behind: tuple[Any, ...] = [], [], None, None, text, [0]
    copies = [(x, weights(), *behind) for _ in number]
    moved = weight_bytes + 2 * sizes.num_tokens * hidden * sizes.value_bytes
    flops = 6.0 * sizes.num_tokens * hidden * inner
    yield OperatorCase("blocks", f"mlp, {hidden} x {inner}", copies, moved, flops)


def logits_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """Final norm and head, for one row of each decoded sequence, or the last of a prompt."""
    hidden, vocab = sizes.shape.hidden_size, sizes.shape.vocab_size
    rows = sizes.num_tokens if sizes.is_decode else 1
    weight_bytes = hidden * vocab * sizes.value_bytes
    x, norm = sizes.full(sizes.num_tokens, hidden), sizes.full(hidden)
    indices = _int32(np.arange(sizes.num_tokens - rows, sizes.num_tokens))
    behind = None, indices, "dense", vocab, 1e-6, 1.0, 0.0
    number = range(sizes.num_copies(weight_bytes))
    copies = [(x, norm, [sizes.weight(hidden, vocab)], *behind) for _ in number]
    moved = weight_bytes + rows * (hidden * sizes.value_bytes + 4 * vocab)
    name, flops = f"{rows} x {hidden} x {vocab}", 2.0 * rows * hidden * vocab
    yield OperatorCase("logits", name, copies, moved, flops)


def norm_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """With a residual."""
    hidden = sizes.shape.hidden_size
    x = sizes.full(sizes.num_tokens, hidden)
    copies = [(x, sizes.full(hidden), None, x, 0, 1e-6, False)]
    num_bytes = 4 * sizes.num_tokens * hidden * sizes.value_bytes
    yield OperatorCase("norm", f"{hidden}", copies, num_bytes, 5.0 * sizes.num_tokens * hidden)


def activate_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """The activation alone."""
    inner = sizes.shape.intermediate_size
    x, silu = sizes.full(sizes.num_tokens, 2 * inner), Activation()
    attributes = FUNCTIONS.index(silu.function), True, silu.clamp, silu.slope, silu.up_offset
    count = sizes.num_tokens * inner
    moved = 3 * count * sizes.value_bytes
    yield OperatorCase("activate", f"{inner}", [(x, *attributes)], moved, 10.0 * count)


def embedding_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """From a table, and from the packed head of a tied model."""
    hidden, vocab = sizes.shape.hidden_size, sizes.shape.vocab_size
    rng = np.random.default_rng(0)
    ids = [_int32(rng.integers(0, vocab, sizes.num_tokens)) for _ in range(MAX_COPIES)]
    num_bytes = 2 * sizes.num_tokens * hidden * sizes.value_bytes
    table, packed = sizes.full(vocab, hidden), sizes.weight(hidden, vocab)
    for name, weight, is_packed in (("table", table, False), ("packed", packed, True)):
        copies = [(i, weight, *[None] * 4, is_packed, hidden, 1.0) for i in ids]
        yield OperatorCase("embedding", f"{name} {hidden}", copies, num_bytes, 0.0)


@dataclass(frozen=True)
class Batch:
    """A decode step (one token each) or one prompt."""

    num_seqs: int
    context_len: int
    blocks_per_seq: int
    inputs: StepInputs  # token ids and logit rows, which blocks do not read, are positions

    @classmethod
    def of(cls, sizes: Sizes) -> Batch:
        """Sequences of context_len tokens whose blocks are scattered over the cache."""
        decode = sizes.is_decode
        num_seqs = sizes.num_tokens if decode else 1
        context = sizes.context_len if decode else sizes.num_tokens
        span = 1 if decode else sizes.num_tokens
        blocks = -(-context // BLOCK_SIZE)
        tables = np.random.default_rng(0).permutation(num_seqs * blocks).reshape(num_seqs, blocks)
        columns = np.arange(context - span, context)
        slots = tables[:, columns // BLOCK_SIZE] * BLOCK_SIZE + columns % BLOCK_SIZE
        positions = _int32(np.tile(columns, num_seqs))
        inputs = StepInputs(
            token_ids=positions,
            positions=positions,
            slot_mapping=_int32(slots.reshape(-1)),
            cu_seqlens_q=_int32(np.arange(num_seqs + 1) * span),
            context_lens=_int32(np.full(num_seqs, context)),
            block_tables=_int32(tables),
            logit_indices=positions,
            max_lens=_int32(max_lens_of([span] * num_seqs, [context] * num_seqs)),
        )
        return cls(num_seqs, context, blocks, inputs)

    def visible_pairs(self, num_tokens: int) -> float:
        """(query token, visible token) pairs of the whole batch."""
        if self.num_seqs == num_tokens:
            return float(num_tokens * self.context_len)
        return num_tokens * (num_tokens + 1) / 2


def _caches(sizes: Sizes, batch: Batch, kv_format: KvFormat) -> list[list[Any]]:
    """The tensors of a layer's cache, in several copies."""
    shape = sizes.shape
    tensors = kv_format.tensors(
        key_value_rows(shape.num_kv_heads, shape.head_dim),
        batch.num_seqs * batch.blocks_per_seq,
        BLOCK_SIZE,
        sizes.dtype,
    )
    num_bytes = _row_bytes(sizes, kv_format) * 2.0 * float(np.prod(tensors[0].shape[:3]))
    count = min(sizes.num_copies(num_bytes), 24)  # as many as a model has layers
    return [[_cache(tensor) for tensor in tensors] for _ in range(count)]


def _row_bytes(sizes: Sizes, kv_format: KvFormat) -> int:
    """Of the key or value of one head and token, with its scales."""
    return kv_format.row_bytes(sizes.shape.head_dim, sizes.value_bytes) + kv_format.scale_bytes


def _cache_bytes(sizes: Sizes, batch: Batch, kv_format: KvFormat) -> float:
    per_token = 2 * sizes.shape.num_kv_heads * _row_bytes(sizes, kv_format)
    return float(batch.num_seqs * batch.context_len * per_token)


def _in_format(name: str, kv_format: KvFormat) -> str:
    return name if kv_format.code_bits is None else f"{name}, {kv_format.name}"


def paged_attention_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """Decode of several sequences, or a whole prompt."""
    shape, batch = sizes.shape, Batch.of(sizes)
    q = sizes.full(sizes.num_tokens, shape.attention_size)
    attributes = shape.num_heads, shape.head_dim**-0.5, -1, 0.0
    step = batch.inputs
    lens = step.cu_seqlens_q, step.context_lens, step.block_tables, step.max_lens
    moved = 2 * sizes.num_tokens * shape.attention_size * sizes.value_bytes
    name = f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}, context {batch.context_len}"
    for kv_format in map(kv_format_of, sizes.kv_formats):
        copies = [
            (q, cache, *lens, None, None, None, None, *attributes, kv_format.name)
            for cache in _caches(sizes, batch, kv_format)
        ]
        num_bytes = _cache_bytes(sizes, batch, kv_format) + moved
        flops = 4.0 * batch.visible_pairs(sizes.num_tokens) * shape.attention_size
        case_name = _in_format(name, kv_format)
        yield OperatorCase("paged_attention", case_name, copies, num_bytes, flops)


def _rope(sizes: Sizes, batch: Batch) -> Any:
    return _full([batch.context_len, sizes.shape.head_dim], "float32")


def rope_and_cache_write_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """Rotation of queries and keys, keys and values to the cache."""
    shape, batch = sizes.shape, Batch.of(sizes)
    qkv, rope = sizes.full(sizes.num_tokens, shape.qkv_size), _rope(sizes, batch)
    inputs = qkv, batch.inputs.positions, batch.inputs.slot_mapping, rope, None, None, None
    flags = (False,) * 4  # plus_one, whole, last, interleaved
    attributes = shape.num_heads, shape.num_kv_heads, shape.head_dim, 1e-6, *flags
    name = f"{shape.num_heads}/{shape.num_kv_heads} x {shape.head_dim}"
    flops = 3.0 * sizes.num_tokens * shape.qkv_size
    for kv_format in map(kv_format_of, sizes.kv_formats):
        behind = None, *attributes, kv_format.name
        copies = [(*inputs, cache, *behind) for cache in _caches(sizes, batch, kv_format)]
        per_token = (shape.qkv_size + shape.attention_size) * sizes.value_bytes
        per_token += 2 * shape.num_kv_heads * _row_bytes(sizes, kv_format)
        moved, case_name = sizes.num_tokens * per_token, _in_format(name, kv_format)
        yield OperatorCase("rope_and_cache_write", case_name, copies, moved, flops)


def attention_block_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """Norm, qkv, rotation, cache write, attention, output projection, residual."""
    shape, batch = sizes.shape, Batch.of(sizes)
    hidden = shape.hidden_size
    weight_bytes = hidden * (shape.qkv_size + shape.attention_size) * sizes.value_bytes
    x, norm = sizes.full(sizes.num_tokens, hidden), sizes.full(hidden)
    bias, rope = sizes.full(shape.qkv_size), _rope(sizes, batch)
    heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
    block = AttentionBlock(*heads, shape.head_dim**-0.5, norm=Norm(epsilon=1e-6), qkv_bias=True)

    def weights() -> list[Any]:
        qkv, out = (hidden, shape.qkv_size), (shape.attention_size, hidden)
        return [norm, sizes.weight(*qkv), bias, sizes.weight(*out), rope]

    name = f"attention, {hidden}, context {batch.context_len}"
    flops = 2.0 * sizes.num_tokens * hidden * (shape.qkv_size + shape.attention_size)
    flops += 4.0 * batch.visible_pairs(sizes.num_tokens) * shape.attention_size
    for kv_format in map(kv_format_of, sizes.kv_formats):
        text = text_of(block, qkv="dense", out="dense", kv_format=kv_format.name)
        behind = batch.inputs.given, None, None, text, [0]
        caches = _caches(sizes, batch, kv_format)
        copies = [(x, weights(), cache, *behind) for cache in caches]
        moved = weight_bytes + _cache_bytes(sizes, batch, kv_format)
        yield OperatorCase("blocks", _in_format(name, kv_format), copies, moved, flops)


def blocks_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """The halves of a layer in Llama's form."""
    yield from mlp_block_cases(sizes)
    yield from attention_block_cases(sizes)


def sample_cases(sizes: Sizes) -> Iterator[OperatorCase]:
    """Greedy, and with temperature, top_k and top_p."""
    import paddle

    if not sizes.is_decode:
        return
    rows, vocab = sizes.num_tokens, sizes.shape.vocab_size
    rng = np.random.default_rng(0)
    logits = paddle.to_tensor(rng.standard_normal((rows, vocab), np.float32) * 3)
    seeds = paddle.to_tensor(np.arange(rows, dtype=np.int64))
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("top_p 0.9", 0.8, 0, 0.9),
        ("top_k 50, top_p 0.9", 0.8, 50, 0.9),
    ):
        limits = _int32(np.full(rows, top_k)), _full([rows], "float32", top_p)
        # The last two are min_p and typical_p: optional, but for their places.
        behind = _full([rows], "float32", temperature), *limits, seeds, seeds, None, None
        moved, case_name = 4.0 * rows * vocab, f"{rows} x {vocab} {name}"
        yield OperatorCase("sample", case_name, [(logits, *behind)], moved, 0.0)


CASES: dict[str, Callable[[Sizes], Iterator[OperatorCase]]] = {
    "linear": linear_cases,
    "blocks": blocks_cases,
    "logits": logits_cases,
    "paged_attention": paged_attention_cases,
    "rope_and_cache_write": rope_and_cache_write_cases,
    "norm": norm_cases,
    "activate": activate_cases,
    "embedding": embedding_cases,
    "sample": sample_cases,
}
