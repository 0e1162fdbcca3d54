"""From a plan, a source and a layout to the decoder: every weight read, packed and in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from predict.device.place import place_tensor
from predict.loading.sources import WeightSource
from predict.nn.decoder import Attention, Decoder, Layer, Linear, Mlp
from predict.nn.rope import rope_table
from predict.nn.weights import LinearPlan, WeightPlan
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

    def vector(name: str, size: int) -> Tensor:
        return tensor(source.vector(name, size))

    def linear(plan: LinearPlan) -> Linear:
        name = layout.scheme(plan)
        tensors = scheme_of(name).tensors(layout.read(plan), dtype, compiled, place)
        values = layout.bias(plan)
        bias = None if values is None else tensor(values)
        return Linear(name, tensors, bias, plan.in_features, plan.out_features)

    all_dense = all(layout.scheme(linear) == "dense" for linear in plan.linears())
    layers = []
    for index, layer in enumerate(plan.layers):
        attention = Attention(
            norm=vector(layer.attention_norm, spec.hidden_size),
            qkv=linear(layer.qkv),
            q_norm=vector(layer.q_norm, spec.head_dim) if layer.q_norm else None,
            k_norm=vector(layer.k_norm, spec.head_dim) if layer.k_norm else None,
            out=linear(layer.out),
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            norm_eps=spec.norm_eps,
            softmax_scale=spec.softmax_scale,
            window=spec.window(index),
            kv_format=kv_format,
        )
        mlp = Mlp(
            norm=vector(layer.mlp_norm, spec.hidden_size),
            gate_up=linear(layer.gate_up),
            down=linear(layer.down),
            intermediate_size=spec.intermediate_size,
            norm_eps=spec.norm_eps,
        )
        layer_weights = Layer(attention, mlp)
        # float32 is for comparing: there the norms stay apart, as references have them.
        if compiled is not None and place is not None and dtype != "float32" and all_dense:
            layer_weights = fold_norms(layer_weights, compiled)
        layers.append(layer_weights)
        if on_layer:
            on_layer(index)
    head = linear(plan.head)
    embedding = None
    # Rows of a quantized head are no embedding: the table stays beside it.
    if not spec.tie_word_embeddings or head.scheme != "dense":
        shape = (spec.vocab_size, spec.hidden_size)
        embedding = tensor(source.matrix((plan.embedding,), shape))
    table = rope_table(spec.rope, spec.head_dim, num_positions, spec.max_position)
    return Decoder(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=vector(plan.final_norm, spec.hidden_size),
        head=head,
        norm_eps=spec.norm_eps,
        rope=paddle.to_tensor(table, place=place),
    )


def fold_norms(layer: Layer, compiled: ModuleType) -> Layer:
    """The layer with its norms' weights multiplied into the matrices behind them, in place.

    Scheme "dense_folded" of the GPU's operators: a norm is then one factor per row, which the
    product itself applies.
    """
    attention, mlp = layer.attention, layer.mlp
    compiled.fold_norm(attention.qkv.tensors[0], attention.norm)
    compiled.fold_norm(mlp.gate_up.tensors[0], mlp.norm)

    def folded(linear: Linear) -> Linear:
        return replace(linear, scheme="dense_folded")

    return Layer(
        replace(attention, qkv=folded(attention.qkv), out=folded(attention.out)),
        replace(mlp, gate_up=folded(mlp.gate_up), down=folded(mlp.down)),
    )


def expected_tensors(plan: WeightPlan, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of every tensor of the plan, stored as the layout has it."""
    spec = plan.spec
    expected: dict[str, tuple[int, ...]] = {plan.embedding: (spec.vocab_size, spec.hidden_size)}
    for name, size in plan.vectors():
        expected[name] = (size,)
    linears = list(plan.linears())
    for linear in linears if spec.tie_word_embeddings else [*linears, plan.head]:
        expected.update(layout.expected(linear))
        if linear.has_bias:
            for prefix, size in zip(linear.prefixes, linear.part_sizes, strict=True):
                expected[prefix + ".bias"] = (size,)
    return expected
