"""Operands of paged attention, and the same in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.library import Library
from predict.nn.inputs import StepInputs, max_lens_of
from tests.support.cpu_kernels import Array, Wide, int32, normal, numpy32, rounded, tensor

Ints = npt.NDArray[np.int32]


def step_of(
    positions: Any, slots: Any, borders: Any, lengths: Any, tables: Any, longest: Any
) -> list[Any]:
    """The tensors of FIELDS; token ids and logit rows, which blocks do not read, are positions."""
    return [
        *StepInputs(
            token_ids=positions,
            positions=positions,
            slot_mapping=slots,
            cu_seqlens_q=borders,
            context_lens=lengths,
            block_tables=tables,
            logit_indices=positions,
            max_lens=longest,
        )
    ]


@dataclass(frozen=True)
class Shape:
    """A batch: spans are (new tokens, context length with them)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    spans: tuple[tuple[int, int], ...]
    window: int = -1
    prefix_lens: tuple[int, ...] = ()  # none, or of each span's request
    sinks: tuple[float, ...] = ()  # none, or of each query head

    @property
    def num_tokens(self) -> int:
        return sum(n for n, _ in self.spans)


@dataclass(frozen=True)
class Batch:
    """Index tensors of a Shape over a cache with shuffled blocks, some of them of nobody."""

    shape: Shape
    num_blocks: int
    block_tables: Ints
    positions: Ints = field(repr=False)
    slots: Ints = field(repr=False)

    @classmethod
    def of(cls, shape: Shape, seed: int = 0) -> Batch:
        rng = np.random.default_rng(seed)
        size = shape.block_size
        counts = [-(-context // size) for _, context in shape.spans]
        num_blocks = sum(counts) + 3
        free = rng.permutation(num_blocks)
        tables = np.full((len(counts), max(counts) + 1), -1, np.int32)
        for row, count in enumerate(counts):
            tables[row, :count], free = free[:count], free[count:]
        positions = [np.arange(c - n, c) for n, c in shape.spans]
        slots = [tables[b, p // size] * size + p % size for b, p in enumerate(positions)]
        return cls(
            shape,
            num_blocks,
            tables,
            np.concatenate(positions).astype(np.int32),
            np.concatenate(slots).astype(np.int32),
        )

    @property
    def borders(self) -> Ints:
        return np.cumsum([0] + [n for n, _ in self.shape.spans]).astype(np.int32)

    @property
    def context_lens(self) -> Ints:
        return np.array([c for _, c in self.shape.spans], np.int32)

    def index_tensors(self) -> tuple[Any, ...]:
        """cu_seqlens_q, context_lens, block_tables, max_lens."""
        lengths, contexts = zip(*self.shape.spans, strict=True)
        longest = max_lens_of(lengths, contexts)
        return tuple(
            int32(a) for a in (self.borders, self.context_lens, self.block_tables, longest)
        )

    def step(self) -> list[Any]:
        """The step's tensors, as regatta_blocks takes them."""
        return step_of(int32(self.positions), int32(self.slots), *self.index_tensors())

    def empty_cache(self) -> Array:
        s = self.shape
        return np.full((self.num_blocks, s.num_kv_heads, s.block_size, s.head_dim), np.nan, "f4")

    def filled_cache(self, contexts: Sequence[Array]) -> Array:
        """contexts: [context, kv heads, D] per request; every other slot is NaN."""
        cache, size = self.empty_cache(), self.shape.block_size
        for table, rows in zip(self.block_tables, contexts, strict=True):
            for i, row in enumerate(rows):
                cache[table[i // size], :, i % size] = row
        return cache

    def context_rows(self, cache: Array) -> list[Array]:
        """The inverse of filled_cache."""
        size = self.shape.block_size
        return [
            np.array([cache[table[i // size], :, i % size] for i in range(context)])
            for table, context in zip(self.block_tables, self.context_lens, strict=True)
        ]


def attention(
    shape: Shape, q: Array, keys: Sequence[Array], values: Sequence[Array], scale: float
) -> Wide:
    """q [T, heads, D]; keys, values [context, kv heads, D] per request. float64 [T, heads * D]."""
    out = np.zeros((len(q), shape.num_heads, shape.head_dim))
    group, token = shape.num_heads // shape.num_kv_heads, 0
    sinks = shape.sinks or (-np.inf,) * shape.num_heads
    prefixes = shape.prefix_lens or (0,) * len(shape.spans)
    spans = zip(shape.spans, prefixes, keys, values, strict=True)
    for (count, context), prefix, key, value in spans:
        for position in range(context - count, context):
            end = max(position + 1, prefix)
            first = 0 if shape.window < 0 else max(0, position - shape.window + 1)
            for head in range(shape.num_heads):
                k = key[first:end, head // group].astype(np.float64)
                v = value[first:end, head // group].astype(np.float64)
                scores = k @ q[token, head].astype(np.float64) * scale
                highest = max(scores.max(), sinks[head])
                weights = np.exp(scores - highest)
                total = weights.sum() + np.exp(sinks[head] - highest)
                out[token, head] = weights @ v / total
            token += 1
    return out.reshape(len(q), -1)


@dataclass(frozen=True)
class Problem:
    batch: Batch
    dtype: str
    q: Array
    keys: list[Array]
    values: list[Array]

    @classmethod
    def of(cls, shape: Shape, dtype: str, seed: int = 1) -> Problem:
        rng = np.random.default_rng(seed)
        kv = [(context, shape.num_kv_heads, shape.head_dim) for _, context in shape.spans]
        return cls(
            Batch.of(shape),
            dtype,
            rounded(2 * normal(rng, shape.num_tokens, shape.num_heads, shape.head_dim), dtype),
            [rounded(normal(rng, *s), dtype) for s in kv],
            [rounded(normal(rng, *s), dtype) for s in kv],
        )

    @property
    def scale(self) -> float:
        return float(self.batch.shape.head_dim) ** -0.5

    def run(self, library: Library) -> Array:
        shape = self.batch.shape
        return numpy32(
            library.op("regatta_paged_attention")(
                tensor(self.q.reshape(shape.num_tokens, -1), self.dtype),
                [
                    tensor(self.batch.filled_cache(self.keys), self.dtype),
                    tensor(self.batch.filled_cache(self.values), self.dtype),
                ],
                *self.batch.index_tensors(),
                *(None, None),
                int32(shape.prefix_lens) if shape.prefix_lens else None,
                tensor(np.array(shape.sinks, "f4"), "float32") if shape.sinks else None,
                shape.num_heads,
                self.scale,
                shape.window,
                0.0,
                "dense",
            )[0]
        )

    def part(self, request: int, begin: int, end: int) -> Problem:
        """Tokens [begin, end) of one request alone, over the context that they see."""
        count, context = self.batch.shape.spans[request]
        seen = context - count + end
        first = int(self.batch.borders[request])
        shape = replace(self.batch.shape, spans=((end - begin, seen),))
        return Problem(
            Batch.of(shape, seed=7),
            self.dtype,
            self.q[first + begin : first + end],
            [self.keys[request][:seen]],
            [self.values[request][:seen]],
        )


def rope_table(num_positions: int, dim: int) -> Array:
    angles = np.outer(np.arange(num_positions), 100.0 ** -(np.arange(0, dim, 2) / dim))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def rotated(x: Wide, table: Array) -> Wide:
    """x [T, heads, D], table [T, R]."""
    half = table.shape[1] // 2
    cos, sin = (part[:, None].astype(np.float64) for part in np.split(table, 2, axis=1))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)
