"""From a plan, a source and a layout to the decoder: every weight read, packed and in its place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.device.place import place_tensor, to_float32
from predict.loading.sources import WeightSource
from predict.nn.blocks import AttentionBlock, alibi_slopes
from predict.nn.decoder import (
    Attention,
    BlockWeights,
    Decoder,
    Embedding,
    Head,
    Layer,
    Linear,
    Mlp,
    NormWeights,
)
from predict.nn.rope import rope_table
from predict.nn.weights import BlockPlan, HeadNormPlan, LinearPlan, NormPlan, WeightPlan
from predict.ops import records
from predict.schemes import scheme_of

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.loading.layouts import Layout


def build_decoder(
    plan: WeightPlan,
    source: WeightSource,
    layout: Layout,
    dtype: str,
    compiled: ModuleType | None,
    num_positions: int,
    on_layer: Callable[[int], None] | None = None,
    place: Any = None,
    kv_format: str = "dense",
) -> Decoder:
    """Reads (or makes up) every weight of the plan, layer by layer, converted to `dtype`.

    source gives embedding and norms, layout the linears, each in a scheme of its own.
    num_positions: rows of the rotary table (tokens). on_layer: called with each finished layer.
    compiled: predict.ops.compiled; None for plain operators.
    place: a GPU's; None for the CPU. kv_format: of the caches that it will run over.
    """
    import paddle

    spec = plan.spec

    def tensor(values: Any) -> Tensor:
        if place is not None:
            return place_tensor(values, dtype, place)
        return paddle.to_tensor(values).astype(dtype)

    def norm(plan: NormPlan | None) -> NormWeights | None:
        if plan is None:
            return None
        bias = plan.bias and tensor(source.vector(plan.bias, plan.size))
        return NormWeights(tensor(source.vector(plan.weight, plan.size)), bias)

    def head_norm(plan: HeadNormPlan) -> NormWeights:
        values = [
            to_float32(source.vector(name, math.prod(shape))).reshape(-1, plan.size)
            for name, shape in plan.tensors
        ]
        return NormWeights(tensor(np.concatenate(values)))

    def linear(plan: LinearPlan) -> Linear:
        name = layout.scheme(plan)
        tensors = scheme_of(name).tensors(layout.read(plan), dtype, compiled, place)
        values = layout.bias(plan)
        bias = None if values is None else tensor(values)
        return Linear(name, tensors, bias, plan.in_features, plan.out_features)

    def slot(plan: LinearPlan | NormPlan | HeadNormPlan) -> Linear | NormWeights | None:
        if isinstance(plan, LinearPlan):
            return linear(plan)
        return head_norm(plan) if isinstance(plan, HeadNormPlan) else norm(plan)

    def block(plan: BlockPlan) -> BlockWeights:
        slots: dict[str, Any] = {name: slot(part) for name, part in plan.slots.items()}
        if isinstance(plan.block, AttentionBlock):
            return Attention(plan.block, slopes=slopes(plan.block), kv_format=kv_format, **slots)
        return Mlp(plan.block, **slots)

    def slopes(block: AttentionBlock) -> Tensor | None:
        if block.positions.kind != "alibi":
            return None
        values = np.array(alibi_slopes(block.num_heads), np.float32) * block.positions.scale
        return paddle.to_tensor(values.astype(np.float32), place=place)

    # float32 is for comparing: there the norms stay apart, as references have them.
    folds = (
        compiled is not None
        and place is not None
        and dtype != "float32"
        and all(layout.scheme(linear) == "dense" for linear in plan.linears())
        and all(map(records.folds_norm, spec.blocks()))
    )
    layers = []
    for index, layer_plan in enumerate(plan.layers):
        layer = tuple(map(block, layer_plan))
        layers.append(fold_norms(layer, compiled) if folds and compiled else layer)
        if on_layer:
            on_layer(index)
    head = Head(
        spec.head,
        norm(plan.final_norm),
        linear(plan.head),
        None if plan.head_projection is None else linear(plan.head_projection),
    )
    tables, offset = dict(plan.matrices()), spec.embedding.position_offset
    embedding = Embedding(
        spec.embedding,
        # Rows of a quantized head are no embedding: the table stays beside it.
        None
        if spec.tie_word_embeddings and head.linear.scheme == "dense"
        else tensor(source.matrix((plan.embedding,), tables[plan.embedding])),
        None if plan.embedding_projection is None else linear(plan.embedding_projection),
        tensor(source.matrix((plan.positions,), tables[plan.positions])[offset:])
        if plan.positions in tables
        else None,
        norm(plan.embedding_norm),
    )
    ropes = tuple(
        paddle.to_tensor(
            rope_table(rope, spec.head_dim, num_positions, spec.max_position), place=place
        )
        for rope in spec.ropes
    )
    return Decoder(embedding, tuple(layers), head, ropes)


def fold_norms(layer: Layer, compiled: ModuleType) -> Layer:
    """The layer with its norms' weights multiplied into the matrices behind them, in place.

    Scheme "dense_folded" of the GPU's operators: a norm is then one factor per row, which the
    product itself applies.
    """

    def folded(linear: Linear) -> Linear:
        return replace(linear, scheme="dense_folded")

    def block(weights: BlockWeights) -> BlockWeights:
        assert weights.norm is not None
        if isinstance(weights, Attention):
            compiled.fold_norm(weights.qkv.tensors[0], weights.norm.weight)
            return replace(weights, qkv=folded(weights.qkv), out=folded(weights.out))
        compiled.fold_norm(weights.gate_up.tensors[0], weights.norm.weight)
        return replace(weights, gate_up=folded(weights.gate_up), down=folded(weights.down))

    return tuple(map(block, layer))


def expected_tensors(plan: WeightPlan, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of every tensor of the plan, stored as the layout has it."""
    expected: dict[str, tuple[int, ...]] = dict(plan.matrices())
    expected.update(plan.norm_tensors())
    for linear in plan.stored_linears():
        expected.update(layout.expected(linear))
        if linear.has_bias:
            for prefix, size in zip(linear.prefixes, linear.part_sizes, strict=True):
                expected[prefix + ".bias"] = (size,)
    return expected
