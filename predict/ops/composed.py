"""Blocks as sequences of smaller operators, for any record.

`ops` is a backend, predict.ops.compiled or predict.ops.plain: its norm, linear, activate, add,
rope_and_cache_write, paged_attention, embedding and take are called, and of requests with adapters
adapted_linear and take_ids; what experts and latents call predict.ops.plain alone has. T tokens,
H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

from predict.nn.blocks import ADAPTED_ROWS, Norm
from predict.nn.decoder import Attention, Experts, LatentAttention, Mlp

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.decoder import BlockWeights, Embedding, Head, Layer, Linear, NormWeights
    from predict.nn.inputs import ForwardInputs, LayerCache


def attention_block(
    ops: ModuleType,
    hidden: Tensor,
    attention: Attention,
    cache: LayerCache,
    ropes: Sequence[Tensor],
    inputs: ForwardInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The block's output [T, H] for hidden [T, H]; the cache is modified in place.

    rows: [L] int32, those that are returned: [L, H].
    """
    block = attention.block
    x = normed(ops, hidden, attention.norm, block.norm)
    qkv = linear(ops, x, attention.qkv, "qkv", inputs)
    qkv = normed(ops, qkv, attention.qk_norm, block.qk_norm)
    q, written = ops.rope_and_cache_write(qkv, attention, cache, ropes, inputs)
    mixed = ops.paged_attention(q, attention, tuple(written), inputs, tree_mask)
    if rows is not None:
        mixed, hidden, x = (ops.take(each, rows) for each in (mixed, hidden, x))
        inputs = _adapters_of(ops, inputs, rows)
    made = linear(ops, mixed, attention.out, "out", inputs)
    return _sum(ops, hidden, x, made, attention), written


def latent_attention_block(
    ops: ModuleType,
    hidden: Tensor,
    attention: LatentAttention,
    cache: LayerCache,
    ropes: Sequence[Tensor],
    inputs: ForwardInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """As `attention_block`; also calls `split`, `turn_and_keep_latents` and `latent_attention`."""
    block = attention.block
    x = normed(ops, hidden, attention.norm, block.norm)
    made = linear(ops, x, attention.qkv_a, "qkv_a", inputs)
    q, latents = ops.split(made, block.latent_size)
    q = normed(ops, q, attention.q_a_norm, block.q_a_norm)
    if attention.q_b is not None:
        q = linear(ops, q, attention.q_b, "q_b", inputs)
    q, written = ops.turn_and_keep_latents(q, latents, attention, cache, ropes, inputs)
    mixed = ops.latent_attention(q, attention, tuple(written), inputs, tree_mask)
    if rows is not None:
        mixed, hidden, x = (ops.take(each, rows) for each in (mixed, hidden, x))
        inputs = _adapters_of(ops, inputs, rows)
    made = linear(ops, mixed, attention.out, "out", inputs)
    return _sum(ops, hidden, x, made, attention), written


def mlp_block(
    ops: ModuleType,
    hidden: Tensor,
    mlp: Mlp,
    before: Tensor | None = None,
    inputs: ForwardInputs | None = None,
) -> Tensor:
    """The block's output [T, H] for hidden [T, H].

    before: what the block ahead read, for one that stands parallel to it. inputs: of requests with
    adapters.
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


def layer(
    ops: ModuleType,
    hidden: Tensor,
    blocks: Layer,
    cache: LayerCache,
    ropes: Sequence[Tensor],
    inputs: ForwardInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The output of one layer, block after block; see `attention_block`."""
    written: list[Tensor] = []
    before = hidden
    is_read_again = any(isinstance(block, Mlp) and block.block.parallel for block in blocks)
    of_rows = inputs if rows is None else _adapters_of(ops, inputs, rows)
    for block in blocks:
        if isinstance(block, (Attention, LatentAttention)):
            before = ops.take(hidden, rows) if is_read_again and rows is not None else hidden
            is_latent = isinstance(block, LatentAttention)
            run = ops.latent_attention_block if is_latent else ops.attention_block
            hidden, written = run(hidden, block, cache, ropes, inputs, tree_mask, rows)
        elif isinstance(block, Experts):
            hidden = ops.expert_block(hidden, block)
        else:
            hidden = ops.mlp_block(hidden, block, before, of_rows)
    return hidden, written


class Run(Protocol):
    """Layers that are called together."""

    def __call__(
        self,
        hidden: Tensor,
        inputs: ForwardInputs,
        tree_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden [T, H], or [L, H] of rows, behind these layers, and their caches."""
        ...


@dataclass(frozen=True)
class LayerRun:
    """One layer, block after block. See Run."""

    ops: ModuleType
    blocks: Layer
    cache: LayerCache
    ropes: Sequence[Tensor]

    def bound(self) -> LayerRun:
        """Itself: see predict.ops.compiled.BoundLayers."""
        return self

    def __call__(
        self,
        hidden: Tensor,
        inputs: ForwardInputs,
        tree_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        return layer(self.ops, hidden, self.blocks, self.cache, self.ropes, inputs, tree_mask, rows)


def layer_runs(
    ops: ModuleType,
    layers: Sequence[Layer],
    caches: Sequence[LayerCache],
    ropes: Sequence[Tensor],
) -> list[LayerRun]:
    """Layer after layer, each by itself."""
    return [
        LayerRun(ops, blocks, cache, ropes) for blocks, cache in zip(layers, caches, strict=True)
    ]


def in_turn(
    ops: ModuleType,
    runs: Iterable[Run],
    hidden: Tensor,
    inputs: ForwardInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """What run after run makes of hidden, and their caches. rows: see the operator `layers`."""
    written: list[Tensor] = []
    for number, run in enumerate(runs):
        if number == 1 and rows is not None:  # the first one has left these alone
            inputs, rows = _adapters_of(ops, inputs, rows), None
        hidden, tensors = run(hidden, inputs, tree_mask, rows)
        written += tensors
    return hidden, written


def linear(
    ops: ModuleType,
    x: Tensor,
    weights: Linear,
    name: str,
    inputs: ForwardInputs | None,
) -> Tensor:
    """The product of x [T, K], with what the adapters of `inputs` add to it, [T, N].

    name: which of ADAPTED_ROWS it is.
    """
    if weights.low_rank is None or inputs is None or inputs.adapter_ids is None:
        return ops.linear(x, weights)
    ids, pages = inputs.adapter_ids, inputs.adapter_pages
    return ops.adapted_linear(x, weights, ids, pages, ADAPTED_ROWS[name])


def _adapters_of(ops: ModuleType, inputs: ForwardInputs, rows: Tensor) -> ForwardInputs:
    """The inputs, whose adapters are those of the tokens `rows`."""
    ids = inputs.adapter_ids
    return inputs if ids is None else inputs._replace(adapter_ids=ops.take_ids(ids, rows))


def embed(ops: ModuleType, inputs: ForwardInputs, embedding: Embedding, head: Linear) -> Tensor:
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
    """What the head's matrix multiplies, of hidden [L, H]."""
    hidden = normed(ops, hidden, head.norm, head.spec.norm)
    return hidden if head.projection is None else ops.linear(hidden, head.projection)


def normed(ops: ModuleType, x: Tensor, weights: NormWeights | None, norm: Norm | None) -> Tensor:
    """The norm of x; x where there is none."""
    return x if weights is None or norm is None else ops.norm(x, weights, norm)


def _sum(ops: ModuleType, hidden: Tensor, x: Tensor, made: Tensor, weights: BlockWeights) -> Tensor:
    """What a block returns. x: what its norm made of its input."""
    block = weights.block
    residual, of = block.residual, block.post_norm_of
    if of == "output":
        made = normed(ops, made, weights.post_norm, block.post_norm)
    source = x if residual.source == "normed" else hidden
    total = ops.add(source, made, residual.input_scale, residual.output_scale)
    return normed(ops, total, weights.post_norm, block.post_norm) if of == "sum" else total
