"""One decoder layer in float32: its weights as NumPy arrays, and its forward pass with captures.

T tokens of a batch of whole sequences, H hidden size. The forward pass is the engine's own: the
functions of `predict.ops.compiled` or `predict.ops.plain` over `predict.nn.decoder`'s records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.sources import WeightSource
from predict.nn.blocks import (
    Activation,
    AttentionBlock,
    Block,
    ExpertBlock,
    MlpBlock,
    Norm,
    Residual,
)
from predict.nn.decoder import Attention, BlockWeights, Layer, Linear, Mlp, NormWeights
from predict.nn.hf_config import ConfigReader
from predict.nn.inputs import ForwardInputs, to_tensors
from predict.nn.spec import DecoderSpec, EmbeddingSpec
from predict.nn.weights import BlockPlan, LayerPlan, LinearPlan, WeightPlan
from predict.ops import composed
from quant.grids import Array

if TYPE_CHECKING:
    from paddle import Tensor

# The linears of a layer, in the order of computation.
KINDS = ("qkv", "out", "gate_up", "down")
BLOCK_SIZE = 64  # of the cache that one forward pass uses


def check_layers(plan: WeightPlan, reader: ConfigReader) -> None:
    """Raises UserError where calibration does not know the network's layers.

    It moves scales between a norm and the product behind it, and between products of Llama's form,
    whose matrices it reads as they lie.
    """
    spec = plan.spec
    plain = spec.embedding == EmbeddingSpec() and spec.head.width is None
    plain = plain and not any(linear.is_stored_otherwise for linear in plan.linears())
    if not plain or not all(map(_is_known, spec.blocks())):
        raise UserError(
            f"{reader.path}: layers of {spec.model_type} cannot be calibrated (allowed: those of "
            "llama, mistral, qwen2, qwen3); round them while loading, with --quant_type"
        )


def _is_known(block: Block) -> bool:
    if isinstance(block, ExpertBlock):
        return False
    norm = block.norm
    if norm is None or norm != Norm(epsilon=norm.epsilon) or block.post_norm is not None:
        return False
    if isinstance(block, MlpBlock) and (block.activation != Activation() or block.parallel):
        return False
    if isinstance(block, AttentionBlock) and (
        block.positions.kind != "rotary"
        or block.positions.two_dimensional
        or block.prefix_mask
        or block.qk_norm_each
        or block.sinks
    ):
        return False
    return block.residual == Residual()


@dataclass
class LinearWeights:
    """A linear in float32."""

    plan: LinearPlan
    weight: Array  # [N, K]
    bias: Array | None  # [N]


@dataclass
class LayerWeights:
    """A layer in float32; calibration changes it in place."""

    index: int
    plan: LayerPlan
    spec: DecoderSpec
    vectors: dict[str, Array] = field(default_factory=dict)  # norms by checkpoint name
    linears: dict[str, LinearWeights] = field(default_factory=dict)  # by kind

    @classmethod
    def read(
        cls, index: int, plan: LayerPlan, spec: DecoderSpec, source: WeightSource
    ) -> LayerWeights:
        """Reads one layer of a checkpoint."""
        layer = cls(index, plan, spec)
        slots = {name: slot for block in plan for name, slot in block.slots.items()}
        for block in plan:
            for _, norm in block.norms():
                layer.vectors[norm.weight] = to_float32(source.vector(norm.weight, norm.size))
        for kind in KINDS:
            linear = slots[kind]
            assert isinstance(linear, LinearPlan)
            names = tuple(prefix + ".weight" for prefix in linear.prefixes)
            weight = to_float32(source.matrix(names, (linear.out_features, linear.in_features)))
            bias = None
            if linear.has_bias:
                names = tuple(prefix + ".bias" for prefix in linear.prefixes)
                bias = to_float32(source.biases(names, linear.out_features))
            layer.linears[kind] = LinearWeights(linear, weight, bias)
        return layer

    def norm_of(self, kind: str) -> str | None:
        """The norm whose output a linear reads; None where it reads another linear's."""
        attention, mlp = (dict(block.norms()) for block in self.plan)
        norm = {"qkv": attention, "gate_up": mlp}.get(kind, {}).get("norm")
        return None if norm is None else norm.weight

    def sharing(self, kind: str) -> npt.NDArray[np.int64] | None:
        """Which input channels of a linear must have one scale: [K] -> number of their set.

        Every query head of a group reads the same value head. None: each channel its own.
        """
        spec = self.spec
        if kind != "out" or spec.num_heads == spec.num_kv_heads:
            return None
        group = spec.num_heads // spec.num_kv_heads
        head, channel = np.divmod(np.arange(spec.num_heads * spec.head_dim), spec.head_dim)
        return head // group * spec.head_dim + channel

    def scale_input(self, kind: str, scale: Array) -> None:
        """Divides a linear's input by scale [K] and multiplies its columns: the same function.

        The division goes into what makes the input: the norm's weight, the value rows of qkv, or
        the up rows of gate_up.
        """
        linear = self.linears[kind]
        linear.weight *= scale
        norm = self.norm_of(kind)
        if norm is not None:
            self.vectors[norm] = self.vectors[norm] / scale
            return
        before = self.linears["qkv" if kind == "out" else "gate_up"]
        if kind == "out":
            sets = self.sharing(kind)
            if sets is not None:
                first = np.unique(sets, return_index=True)[1]
                scale = scale[first]
        rows = slice(before.weight.shape[0] - len(scale), None)
        before.weight[rows] /= scale[:, None]
        if before.bias is not None:
            before.bias[rows] /= scale

    def records(self, compiled: ModuleType | None, plain: dict[str, Array] | None = None) -> Layer:
        """The layer as the operators take it, float32; `plain` stands in for weights by kind.

        compiled: predict.ops.compiled; None for plain operators.
        """
        import paddle

        plain = plain or {}

        def linear(kind: str) -> Linear:
            weights = self.linears[kind]
            matrix = paddle.to_tensor(plain.get(kind, weights.weight))
            if compiled is not None:
                matrix = compiled.pack_dense(matrix, "float32")
            bias = None if weights.bias is None else paddle.to_tensor(weights.bias)
            rows, columns = weights.weight.shape
            return Linear("dense", (matrix,), bias, columns, rows)

        def block(plan: BlockPlan) -> BlockWeights:
            slots: dict[str, Any] = {name: linear(name) for name, _ in plan.linears()}
            for name, norm in plan.norms():
                slots[name] = NormWeights(paddle.to_tensor(self.vectors[norm.weight]))
            if isinstance(plan.block, AttentionBlock):
                return Attention(plan.block, **slots)
            assert isinstance(plan.block, MlpBlock)  # check_layers
            return Mlp(plan.block, **slots)

        return tuple(map(block, self.plan))


@dataclass(frozen=True)
class Captured:
    """What one batch made a layer compute."""

    inputs: dict[str, Array]  # of each linear by kind, [T, K]
    keys: Array  # [T, num_kv_heads, head_dim], rotated, as the cache takes them
    values: Array  # [T, num_kv_heads, head_dim]
    output: Array  # [T, H]


def run_layer(
    backend: ModuleType,
    layer: Layer,
    hidden: Array,
    lengths: Sequence[int],
    ropes: Sequence[Tensor],
) -> Captured:
    """One forward pass of whole sequences, one after another in hidden [T, H].

    lengths: tokens of each sequence. ropes: the engine's rotary tables.
    """
    import paddle

    with paddle.no_grad():
        x = paddle.to_tensor(hidden)
        attention, mlp = layer
        assert isinstance(attention, Attention)
        assert isinstance(mlp, Mlp)
        normed = composed.normed(backend, x, attention.norm, attention.block.norm)
        qkv = backend.linear(normed, attention.qkv)
        mixed: list[Tensor] = []
        keys: list[Array] = []
        values: list[Array] = []
        start = 0
        for length in lengths:
            # One sequence at a time: plain Paddle's scores are as large as its longest context
            # squared, and padding would multiply that by the batch.
            span = qkv[start : start + length]
            out, key, value = _attend(backend, attention, span, ropes)
            mixed.append(out)
            keys.append(key)
            values.append(value)
            start += length
        attended = paddle.concat(mixed) if len(mixed) > 1 else mixed[0]
        x = x + backend.linear(attended, attention.out)
        mlp_normed = composed.normed(backend, x, mlp.norm, mlp.block.norm)
        inner = backend.activate(backend.linear(mlp_normed, mlp.gate_up), mlp.block.activation)
        x = x + backend.linear(inner, mlp.down)
    made = {"qkv": normed, "out": attended, "gate_up": mlp_normed, "down": inner}
    return Captured(
        inputs={kind: tensor.numpy() for kind, tensor in made.items()},
        keys=np.concatenate(keys),
        values=np.concatenate(values),
        output=x.numpy(),
    )


def _attend(
    backend: ModuleType, attention: Attention, qkv: Tensor, ropes: Sequence[Tensor]
) -> tuple[Tensor, Array, Array]:
    """Mixed values [T, heads * D] of one sequence, and its keys and values [T, kv_heads, D]."""
    import paddle

    length = qkv.shape[0]
    num_blocks = -(-length // BLOCK_SIZE)
    block = attention.block
    shape = [num_blocks, block.num_kv_heads, BLOCK_SIZE, block.head_dim]
    empty = (paddle.zeros(shape, "float32"), paddle.zeros(shape, "float32"))
    positions = np.arange(length, dtype=np.int32)
    inputs = to_tensors(
        ForwardInputs(
            token_ids=np.zeros(length, np.int32),
            positions=positions,
            slot_mapping=positions,
            cu_seqlens_q=np.array([0, length], np.int32),
            context_lens=np.array([length], np.int32),
            block_tables=np.arange(num_blocks, dtype=np.int32)[None],
            logit_indices=np.zeros(1, np.int32),
            max_lens=np.array([length, length], np.int32),
        ),
        qkv.place,
    )
    q, cache = backend.rope_and_cache_write(qkv, attention, empty, ropes, inputs)
    mixed = backend.paged_attention(q, attention, cache, inputs)

    def by_token(cache: Tensor) -> Array:
        heads, dim = block.num_kv_heads, block.head_dim
        by_slot = cache.numpy().transpose(0, 2, 1, 3).reshape(-1, heads, dim)
        kept: Array = by_slot[:length]
        return kept

    key_cache, value_cache = cache
    return mixed, by_token(key_cache), by_token(value_cache)
