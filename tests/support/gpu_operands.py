"""Operands of the operators: each one rounded to its dtype, as float32 on the CPU for the plain
twins in predict.ops.plain and as it is on the GPU for the kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from predict.device.devices import Device
from predict.nn.blocks import (
    Block,
    HeadMatrices,
    HeadSlot,
    Linear,
    LinearSlot,
    NormSlot,
    NormWeights,
    TableSlot,
)
from predict.nn.decoder import Layer, map_tensors
from predict.nn.inputs import RowKind, StepInputs, max_lens_of, to_tensors
from predict.nn.kinds.attention import Attention
from predict.nn.kinds.mlp import Mlp
from predict.nn.rope import rope_table
from predict.nn.spec import RopeSpec
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.block_forms import blocks_of, layer_of
from tests.support.records import attention_of, mlp_of
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

Tree = TypeVar("Tree")
MAX_POSITION = 40_000


class Both(NamedTuple):
    """One operand in its two forms."""

    plain: Any  # float32, CPU
    device: Any  # the tested dtype, GPU


class Span(NamedTuple):
    """One request's part of a step, in tokens."""

    cached: int
    new: int


@dataclasses.dataclass(frozen=True)
class Heads:
    """The shape of an attention."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    window: int = -1
    rotary_dim: int | None = None
    sinks: bool = False

    @property
    def size(self) -> int:
        """Columns of the queries."""
        return self.num_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Columns of queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@functools.cache
def _rope_table(
    head_dim: int, rotary_dim: int | None, num_positions: int
) -> npt.NDArray[np.float32]:
    return rope_table(RopeSpec(rotary_dim=rotary_dim), head_dim, num_positions, num_positions)


def _sinks(num_heads: int) -> Any:
    """As high as the sum of 1 to some 10,000 scores; far below, far above and above all scores."""
    import paddle

    values = np.fmod(0.5 + 4.1 * np.arange(num_heads, dtype=np.float32), 11)
    values[3::8], values[5::8], values[6::8] = -1e4, 1e4, values[6::8] + 30
    return paddle.to_tensor(values, place=paddle.CPUPlace())


def numpy_of(tensor: Any) -> npt.NDArray[np.float32]:
    """float32 values of a tensor of any device."""
    values: npt.NDArray[np.float32] = tensor.cpu().astype("float32").numpy()
    return values


def compare(got: Any, wanted: Any, dtype: str, roundings: int = 1) -> None:
    """Within the dtype's tolerance of the plain result, NaN in the same places."""
    left, right = (x if isinstance(x, np.ndarray) else numpy_of(x) for x in (got, wanted))
    np.testing.assert_array_equal(np.isnan(left), np.isnan(right))
    assert_close(np.nan_to_num(left), np.nan_to_num(right), dtype, roundings)


def same(got: Any, wanted: Any) -> None:
    """Equal bit for bit, or both NaN."""
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(numpy_of(got), numpy_of(wanted))


def flat(outputs: tuple[Any, Sequence[Any]]) -> list[Any]:
    """A layer's output and its caches."""
    return [outputs[0], *outputs[1]]


class Operands:
    """Random operands of one dtype; the same ones for the same seed."""

    def __init__(self, gpu: Device, dtype: str, seed: int = 0) -> None:
        self.gpu = gpu
        self.dtype = dtype
        self.generator = np.random.default_rng(seed)

    @contextmanager
    def on_cpu(self) -> Iterator[None]:
        """What Paddle makes in this block without a place is made on the CPU."""
        import paddle

        paddle.set_device("cpu")
        try:
            yield
        finally:
            paddle.set_device(self.gpu.name)

    def placed(self, values: npt.NDArray[Any], dtype: str | None = None) -> Any:
        import paddle

        tensor = paddle.to_tensor(values, place=paddle.CPUPlace())
        return (tensor.astype(dtype) if dtype else tensor)._copy_to(self.gpu.place(), True)

    def both(self, values: npt.NDArray[np.float32]) -> Both:
        """The array, rounded to the dtype, in both forms."""
        import paddle

        rounded = paddle.to_tensor(values, place=paddle.CPUPlace()).astype(self.dtype)
        return Both(rounded.astype("float32"), rounded._copy_to(self.gpu.place(), True))

    def tensor(self, *shape: int, around: float = 0.0, scale: float = 1.0) -> Both:
        values = self.generator.standard_normal(shape, np.float32)
        return self.both((around + scale * values).astype(np.float32))

    def on_gpu(self, tree: Tree) -> Tree:
        """A weight tree of CPU float32 tensors as the kernels take it."""

        def placed(path: str, tensor: Any) -> Any:
            if not path.endswith(("slopes", "sinks")):
                tensor = tensor.astype(self.dtype)
            return tensor._copy_to(self.gpu.place(), True)

        return map_tensors(tree, placed)

    def linear(self, num_in: int, num_out: int, bias: bool = False) -> Linear:
        """A plain linear whose outputs are about as large as its inputs."""
        weight = self.tensor(num_out, num_in, scale=num_in**-0.5).plain
        return Linear(
            "dense", (weight,), self.tensor(num_out).plain if bias else None, num_in, num_out
        )

    def layer(
        self, hidden: int, inner: int, heads: Heads, bias: bool, qk_norm: bool
    ) -> tuple[Attention, Mlp]:
        def norm(size: int) -> Any:
            return self.tensor(size, around=1.0, scale=0.1).plain

        attention = attention_of(
            qkv=self.linear(hidden, heads.qkv_size, bias),
            out=self.linear(heads.size, hidden, bias),
            norm=norm(hidden),
            heads=(heads.num_heads, heads.num_kv_heads, heads.head_dim),
            qk_norms=(norm(heads.head_dim), norm(heads.head_dim)) if qk_norm else None,
            window=heads.window,
        )
        if heads.sinks:
            block = dataclasses.replace(attention.block, sinks=True)
            attention = dataclasses.replace(attention, block=block, sinks=_sinks(heads.num_heads))
        gate_up, down = self.linear(hidden, 2 * inner, bias), self.linear(inner, hidden, bias)
        return attention, mlp_of(gate_up, down, norm(hidden))

    def layer_of_form(
        self, form: str, heads: tuple[int, int, int], hidden: int, inner: int
    ) -> Layer:
        return layer_of(
            blocks_of(form, heads, inner),
            hidden,
            self.linear,
            lambda size, around: self.tensor(size, around=around, scale=0.1).plain,
            lambda values: self.both(values).plain,
        )

    def weights(self, block: Block, hidden_size: int) -> dict[str, Any]:
        """Random ones of a block's slots, float32 on the CPU, rounded to the dtype."""

        def linear(slot: LinearSlot) -> Linear:
            size, count = sum(slot.part_sizes), slot.num_experts
            shape = (count, size, slot.in_features) if count else (size, slot.in_features)
            weight = self.tensor(*shape, scale=slot.in_features**-0.5).plain
            bias = self.tensor(*shape[:-1], scale=0.3).plain if slot.has_bias else None
            return Linear("dense", (weight,), bias, slot.in_features, size, count)

        made: dict[str, Any] = {}
        for slot in block.slots(hidden_size):
            if isinstance(slot, LinearSlot):
                made[slot.name] = linear(slot)
            elif isinstance(slot, TableSlot):
                scale = 0.3 if slot.is_float32 else 3.0 * hidden_size**-0.5
                made[slot.name] = self.tensor(*slot.shape, scale=scale).plain
            elif isinstance(slot, NormSlot):
                weight = self.tensor(slot.size, around=1.0, scale=0.1).plain
                bias = self.tensor(slot.size, scale=0.1).plain if slot.norm.bias else None
                made[slot.name] = NormWeights(weight, bias)
            elif isinstance(slot, HeadSlot):
                heads, width = slot.num_heads, slot.in_features
                shapes = [(heads, size, width) for size in slot.part_sizes]
                parts = (self.tensor(*shape, scale=width**-0.5).plain for shape in shapes)
                made[slot.name] = HeadMatrices(*parts)
        return made

    def ropes(self, heads: Heads, num_positions: int = MAX_POSITION) -> Both:
        """The one rotary table, float32 in both forms."""
        import paddle

        table = _rope_table(heads.head_dim, heads.rotary_dim, num_positions)
        return Both((paddle.to_tensor(table, place=paddle.CPUPlace()),), (self.placed(table),))


class Step:
    """The inputs of a step and a paged cache; blocks are scattered, unused slots hold NaN."""

    def __init__(
        self,
        operands: Operands,
        spans: Sequence[Span],
        heads: Heads,
        block_size: int,
        num_padding: int = 0,
        filled: bool = False,
        prefix_lens: Sequence[int] = (),
    ) -> None:
        """num_padding: rows of T behind the last span. filled: the step's own tokens, too, are in
        the cache already. prefix_lens: of each span's request, for a model that reads them.
        """
        import paddle

        self.operands = operands
        counts = [-(-(span.cached + span.new) // block_size) for span in spans]
        num_blocks = sum(counts) + 3
        ids = operands.generator.permutation(num_blocks)[: sum(counts)].astype(np.int32)
        tables = np.full((len(spans), max([*counts, 1])), -1, np.int32)
        shape = (num_blocks, heads.num_kv_heads, block_size, heads.head_dim)
        pools = [np.full(shape, np.nan, np.float32) for _ in range(2)]
        positions: list[npt.NDArray[np.int64]] = []
        slots: list[npt.NDArray[np.int64]] = []
        start = 0
        for row, (span, count) in enumerate(zip(spans, counts, strict=True)):
            blocks = ids[start : start + count].astype(np.int64)
            tables[row, :count] = blocks
            start += count
            everything = np.arange(span.cached + span.new)
            known = everything if filled else everything[: span.cached]
            for pool in pools:
                values = operands.generator.standard_normal(
                    (len(known), heads.num_kv_heads, heads.head_dim), np.float32
                )
                pool[blocks[known // block_size], :, known % block_size] = values
            own = everything[span.cached :]
            positions.append(own)
            slots.append(blocks[own // block_size] * block_size + own % block_size)
        lengths = np.array([span.new for span in spans])
        borders = np.concatenate([[0], np.cumsum(lengths)])
        contexts = np.array([span.cached + span.new for span in spans])
        padding = np.zeros(num_padding, np.int64)
        self.num_tokens = int(borders[-1]) + num_padding
        self.arrays = StepInputs(
            token_ids=np.zeros(self.num_tokens),
            positions=np.concatenate([*positions, padding]),
            slot_mapping=np.concatenate([*slots, padding - 1]),
            cu_seqlens_q=borders,
            context_lens=contexts,
            block_tables=tables,
            logit_indices=np.maximum(borders[1:] - 1, 0),
            max_lens=max_lens_of(np.maximum(lengths, 1), np.maximum(contexts, 1)),
        )
        if prefix_lens:
            second = np.concatenate([*(own % 7 for own in positions), padding])
            self.arrays = self.arrays._replace(
                block_positions=second, prefix_lens=np.array(prefix_lens)
            )
        self.plain = to_tensors(self.arrays, paddle.CPUPlace())
        self.device = to_tensors(self.arrays, operands.gpu.place())
        self.pools = tuple(pools)

    def of_rows(self, rows: npt.NDArray[Any]) -> StepInputs:
        """The GPU's inputs with these rows, and with their kind."""
        import paddle

        kind = RowKind.LISTED
        if np.array_equal(rows, np.arange(self.num_tokens)):
            kind = RowKind.ALL
        elif np.array_equal(rows, self.arrays.cu_seqlens_q[1:] - 1):
            kind = RowKind.LAST
        lens = np.array((*self.arrays.max_lens[:4], kind), np.int32)
        return self.device._replace(
            logit_indices=self.operands.placed(rows.astype(np.int32)),
            max_lens=paddle.to_tensor(lens, place=paddle.CPUPlace()),
        )

    def caches(self) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
        """New key and value caches: plain ones, and the GPU's."""
        key, value = (self.operands.both(pool) for pool in self.pools)
        return (key.plain, value.plain), (key.device, value.device)


DTYPES = ("float32", "bfloat16", "float16")


HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)
# (query heads, key/value heads): one to one, one to all, and groups of any size between.
HEADS = ((1, 1), (8, 8), (8, 2), (14, 2), (32, 4), (16, 1), (9, 3))


def attention_weights(operands: Operands, heads: Heads, qk_norm: bool = False) -> Any:
    return operands.layer(8, 8, heads, False, qk_norm)[0]


def compare_heads(got: Any, wanted: Any, heads: Heads, dtype: str, roundings: int = 2) -> None:
    """Each head of a token against its own size, or the token's where that is larger.

    A token that sees few positions has the larger values. A sink takes its head's weight away, so
    that a token's few other heads have all its values, and the errors.
    roundings: the weights of the values are rounded as well as the result.
    """
    left, right = numpy_of(got), numpy_of(wanted)
    squares = np.square(right).reshape(len(right), heads.num_heads, heads.head_dim).mean(axis=2)
    token = np.sqrt(squares.mean(axis=1, keepdims=True))
    size = np.repeat(np.maximum(np.sqrt(squares), token), heads.head_dim, axis=1)
    assert_close(left, right, dtype, roundings, size)


def decode_spans(block: int) -> list[Span]:
    lengths = (1, 2, block - 1, block, block + 1, 3 * block - 1, 900, 4096)
    spans = [Span(length - 1, 1) for length in lengths]
    return [*spans[:4], Span(0, 0), *spans[4:], Span(50, 0)]


def prefill_spans(block: int) -> list[Span]:
    fresh = [Span(0, n) for n in (1, block - 1, block, block + 1, 257)]
    return [*fresh, Span(0, 0), Span(block - 1, 2), Span(700, 130), Span(33, 1), Span(321, 5)]


def check_layers(
    step: Step,
    heads: Heads,
    plain: Sequence[Layer],
    layers: Sequence[Layer],
    hidden_size: int,
    roundings: int,
) -> None:
    """Asserts that the GPU's layers are their plain twins.

    All of them on all rows, then those up to the second attention on the rows to sample from. Of
    fewer layers fewer values were rounded.
    """
    operands = step.operands
    rope, hidden = operands.ropes(heads), operands.tensor(step.num_tokens, hidden_size)
    with_caches = [index for index, layer in enumerate(plain) if isinstance(layer[0], Attention)]
    rows = step.arrays.logit_indices
    for count, some in ((len(plain), None), ([*with_caches, len(plain)][1], rows)):
        pairs = [step.caches() if i in with_caches else ((), ()) for i in range(count)]
        got = ops.layers(
            hidden.device,
            layers[:count],
            [pair[1] for pair in pairs],
            rope.device,
            step.device if some is None else step.of_rows(some),
            rows=None if some is None else step.device.logit_indices,
        )
        with operands.on_cpu():
            out, written = reference.layers(
                hidden.plain, plain[:count], [pair[0] for pair in pairs], rope.plain, step.plain
            )
        wanted = [numpy_of(out) if some is None else numpy_of(out)[some], *map(numpy_of, written)]
        fewer = BLOCK_ROUNDINGS if count < len(plain) else 0
        for mine, theirs in zip(flat(got), wanted, strict=True):
            compare(mine, theirs, operands.dtype, roundings - fewer)
