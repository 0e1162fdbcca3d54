"""Blocks as sequences of smaller operators, for any record.

`ops` is a backend, predict.ops.compiled or predict.ops.plain. Both have the operators that are
called here, except those of experts and latents, which predict.ops.plain alone has. T tokens, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from predict.nn.blocks import ADAPTED_ROWS, Norm
from predict.nn.decoder import Attention, Experts, LatentAttention, Mlp

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.decoder import BlockWeights, Embedding, Head, Layer, Linear, NormWeights
    from predict.nn.inputs import LayerCache, StepInputs


def attention_block(
    ops: ModuleType,
    hidden: Tensor,
    attention: Attention | LatentAttention,
    cache: LayerCache,
    ropes: Sequence[Tensor],
    inputs: StepInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The block's output [T, H] for hidden [T, H]; the cache is modified in place.

    rows: [L] int32, those that are returned: [L, H].
    """
    x = normed(ops, hidden, attention.norm, attention.block.norm)
    if isinstance(attention, LatentAttention):
        q, latents = _queries_and_latents(ops, x, attention, inputs)
        q, written = ops.turn_and_keep_latents(q, latents, attention, cache, ropes, inputs)
        mixed = ops.latent_attention(q, attention, tuple(written), inputs, tree_mask)
    else:
        qkv = linear(ops, x, attention.qkv, "qkv", inputs)
        qkv = normed(ops, qkv, attention.qk_norm, attention.block.qk_norm)
        q, written = ops.rope_and_cache_write(qkv, attention, cache, ropes, inputs)
        mixed = ops.paged_attention(q, attention, tuple(written), inputs, tree_mask)
    if rows is not None:
        mixed, hidden, x = (ops.take(each, rows) for each in (mixed, hidden, x))
        inputs = _adapters_of(ops, inputs, rows)
    made = linear(ops, mixed, attention.out, "out", inputs)
    return _sum(ops, hidden, x, made, attention), written


def _queries_and_latents(
    ops: ModuleType, x: Tensor, attention: LatentAttention, inputs: StepInputs
) -> tuple[Tensor, Tensor]:
    """Queries and latents of x [T, H], neither rotated."""
    block = attention.block
    q, latents = ops.split(linear(ops, x, attention.qkv_a, "qkv_a", inputs), block.latent_size)
    q = normed(ops, q, attention.q_a_norm, block.q_a_norm)
    if attention.q_b is not None:
        q = linear(ops, q, attention.q_b, "q_b", inputs)
    return q, latents


def mlp_block(
    ops: ModuleType,
    hidden: Tensor,
    mlp: Mlp,
    before: Tensor | None = None,
    inputs: StepInputs | None = None,
) -> Tensor:
    """The block's output [T, H] for hidden [T, H].

    before: the previous block's input, which a parallel block reads. inputs: for adapters.
    """
    block = mlp.block
    x = normed(ops, before if block.parallel else hidden, mlp.norm, block.norm)
    made = linear(ops, x, mlp.gate_up, "gate_up", inputs)
    inner = ops.activate(made, block.activation)
    made = linear(ops, inner, mlp.down, "down", inputs)
    return _sum(ops, hidden, x, made, mlp)


def expert_block(ops: ModuleType, hidden: Tensor, weights: Experts) -> Tensor:
    """The block's output [T, H] for hidden [T, H]."""
    block = weights.block
    x = normed(ops, hidden, weights.norm, block.norm)
    made = ops.experts(x, *ops.route(x, weights), weights)
    if weights.shared_gate_up is not None and weights.shared_down is not None:
        inner = ops.activate(ops.linear(x, weights.shared_gate_up), block.activation)
        shared = ops.linear(inner, weights.shared_down)
        if weights.shared_gate is not None:
            shared = ops.gate(shared, x, weights.shared_gate)
        made = ops.add(made, shared)
    return _sum(ops, hidden, x, made, weights)


# Layers that are called together: (hidden [T, H], inputs, tree_mask, rows) -> hidden behind them,
# [T, H] or [L, H] of rows, and their written caches.
JoinedLayers: TypeAlias = "Callable[..., tuple[Tensor, list[Tensor]]]"


@dataclass(frozen=True)
class LayerRun:
    """One layer, block after block. See Run."""

    ops: ModuleType
    blocks: Layer
    cache: LayerCache
    ropes: Sequence[Tensor]

    def bound(self) -> LayerRun:
        """The run for predict.ops.compiled.BoundLayers: itself."""
        return self

    def __call__(
        self,
        hidden: Tensor,
        inputs: StepInputs,
        tree_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        ops, before = self.ops, hidden
        written: list[Tensor] = []
        is_read_again = any(isinstance(w, Mlp) and w.block.parallel for w in self.blocks)
        of_rows = inputs if rows is None else _adapters_of(ops, inputs, rows)
        for block in self.blocks:
            if isinstance(block, (Attention, LatentAttention)):
                before = ops.take(hidden, rows) if is_read_again and rows is not None else hidden
                hidden, written = ops.attention_block(
                    hidden, block, self.cache, self.ropes, inputs, tree_mask, rows
                )
            elif isinstance(block, Experts):
                hidden = ops.expert_block(hidden, block)
            else:
                hidden = ops.mlp_block(hidden, block, before, of_rows)
        return hidden, written


def layer_runs(
    ops: ModuleType, layers: Sequence[Layer], caches: Sequence[LayerCache], ropes: Sequence[Tensor]
) -> list[LayerRun]:
    """Layer after layer, each by itself."""
    return [
        LayerRun(ops, blocks, cache, ropes) for blocks, cache in zip(layers, caches, strict=True)
    ]


def in_turn(
    ops: ModuleType,
    runs: Iterable[JoinedLayers],
    hidden: Tensor,
    inputs: StepInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Hidden behind all runs, and their written caches. rows: see the operator `layers`."""
    written: list[Tensor] = []
    for number, run in enumerate(runs):
        if number == 1 and rows is not None:  # the first run returned these rows alone
            inputs, rows = _adapters_of(ops, inputs, rows), None
        hidden, tensors = run(hidden, inputs, tree_mask, rows)
        written += tensors
    return hidden, written


def linear(
    ops: ModuleType, x: Tensor, weights: Linear, name: str, inputs: StepInputs | None
) -> Tensor:
    """The product of x [T, K], with what the adapters of `inputs` add to it, [T, N].

    name: which of ADAPTED_ROWS it is.
    """
    if weights.low_rank is None or inputs is None or inputs.adapter_ids is None:
        return ops.linear(x, weights)
    ids, pages = inputs.adapter_ids, inputs.adapter_pages
    return ops.adapted_linear(x, weights, ids, pages, ADAPTED_ROWS[name])


def _adapters_of(ops: ModuleType, inputs: StepInputs, rows: Tensor) -> StepInputs:
    """The inputs with the adapters of the tokens `rows`."""
    ids = inputs.adapter_ids
    return inputs if ids is None else inputs._replace(adapter_ids=ops.take_ids(ids, rows))


def embed(ops: ModuleType, inputs: StepInputs, embedding: Embedding, head: Linear) -> Tensor:
    """The first layer's input [T, H]."""
    spec = embedding.spec
    hidden = ops.embedding(inputs.token_ids, embedding.table, head)
    if spec.scale != 1.0:
        hidden = ops.add(hidden, None, spec.scale)
    if embedding.projection is not None:
        hidden = ops.linear(hidden, embedding.projection)
    if embedding.positions is not None:
        hidden = ops.add(hidden, ops.embedding(inputs.positions, embedding.positions, head))
    return normed(ops, hidden, embedding.norm, spec.norm)


def before_head(ops: ModuleType, hidden: Tensor, head: Head) -> Tensor:
    """The input of the head's matrix, from hidden [L, H]."""
    hidden = normed(ops, hidden, head.norm, head.spec.norm)
    return hidden if head.projection is None else ops.linear(hidden, head.projection)


def normed(ops: ModuleType, x: Tensor, weights: NormWeights | None, norm: Norm | None) -> Tensor:
    """The norm of x; x itself without a norm."""
    return x if weights is None or norm is None else ops.norm(x, weights, norm)


def _sum(ops: ModuleType, hidden: Tensor, x: Tensor, made: Tensor, weights: BlockWeights) -> Tensor:
    """A block's output. x: its normed input. made: the output of its last product."""
    block = weights.block
    residual, of = block.residual, block.post_norm_of
    if of == "output":
        made = normed(ops, made, weights.post_norm, block.post_norm)
    source = x if residual.source == "normed" else hidden
    total = ops.add(source, made, residual.input_scale, residual.output_scale)
    return normed(ops, total, weights.post_norm, block.post_norm) if of == "sum" else total
