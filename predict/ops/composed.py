"""Layers block after block, and what stands around them, as sequences of smaller operators.

`ops` is a backend, predict.ops.compiled or predict.ops.plain. T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from predict.nn.blocks import BlockStep, normed, of_rows

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.blocks import Linear
    from predict.nn.decoder import Embedding, Head, Layer, StepOutputs
    from predict.nn.inputs import LayerCache, StepInputs
    from predict.nn.kinds.attention import Attention
    from predict.nn.spec import Share


# Layers that are called together: (hidden [T, H], inputs, tree_mask, rows) -> hidden behind them,
# [T, H] or [L, H] of rows, and their written caches.
JoinedLayers: TypeAlias = "Callable[..., tuple[Tensor, list[Tensor]]]"


@dataclass(frozen=True)
class LayerRun:
    """One layer, block after block. See JoinedLayers."""

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
        ops, written = self.ops, []
        step = BlockStep(self.cache, self.ropes, inputs, tree_mask, rows)
        is_read_again = any(weights.block.reads_before for weights in self.blocks)
        for weights in self.blocks:
            before = hidden
            hidden, kept = ops.block(hidden, weights, step)
            written += kept
            if step.rows is not None:  # the first block returned these rows alone
                before = ops.take(before, step.rows) if is_read_again else before
                step = step.of_rows(ops)
            step = step._replace(cache=(), before=before)
        return hidden, written


def layer_runs(
    ops: ModuleType, pairs: Iterable[tuple[Layer, LayerCache]], ropes: Sequence[Tensor]
) -> Iterator[LayerRun]:
    """Layer after layer, each by itself. pairs: layers and their caches."""
    return (LayerRun(ops, blocks, cache, ropes) for blocks, cache in pairs)


class BoundLayers:
    """The operator `layers` for tensors that stay the same."""

    ops: ModuleType
    runs: Callable[..., Iterator[Any]] = staticmethod(layer_runs)  # a backend's own

    def __init__(
        self, layers: Sequence[Layer], caches: Sequence[LayerCache], ropes: Sequence[Tensor]
    ):
        self._pairs, self._ropes = list(zip(layers, caches, strict=True)), ropes
        self._kept: list[Any] = []  # runs that keep the tensors alive
        self._runs: dict[tuple[int, int], list[JoinedLayers]] = {}

    def __call__(
        self,
        hidden: Tensor,
        inputs: StepInputs,
        tree_mask: Tensor | None = None,
        part: tuple[int, int] | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden [T, H], or [L, H] of rows, behind the layers; the caches are modified in place.

        part: the first layer and the one behind the last; None: all. rows: see `layers`.
        """
        runs = self._runs_of(part or (0, len(self._pairs)))
        return in_turn(self.ops, runs, hidden, inputs, tree_mask, rows)[0]

    def forget(self) -> None:
        """Gathers the tensors again with the next call: their memory is another one."""
        self._runs.clear()
        self._kept.clear()

    def _runs_of(self, part: tuple[int, int]) -> list[JoinedLayers]:
        found = self._runs.get(part)
        if found is None:
            runs = list(self.runs(self.ops, self._pairs[slice(*part)], self._ropes))
            self._kept += runs
            self._runs[part] = found = [run.bound() for run in runs]
        return found


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
            inputs, rows = of_rows(ops, inputs, rows), None
        hidden, tensors = run(hidden, inputs, tree_mask, rows)
        written += tensors
    return hidden, written


def embed(ops: ModuleType, inputs: StepInputs, embedding: Embedding, head: Linear) -> Tensor:
    """The first layer's input [T, H]."""
    spec, share = embedding.spec, embedding.share
    if share is None:
        hidden = ops.embedding(inputs.token_ids, embedding.table, head)
    else:
        # Of other ranks' tokens the last row, which is zeros.
        rows = ops.own_rows(inputs.token_ids, *share.tokens(), share.num_rows - 1)
        hidden = ops.sum_ranks(ops.embedding(rows, embedding.table, head))
    if spec.scale != 1.0:
        hidden = ops.add(hidden, None, spec.scale)
    if embedding.projection is not None:
        hidden = ops.linear(hidden, embedding.projection)
    if embedding.positions is not None:
        hidden = ops.add(hidden, ops.embedding(inputs.positions, embedding.positions, head))
    if inputs.image_rows is not None and embedding.images is not None:
        hidden = with_images(ops, hidden, embedding.images, inputs.image_rows)
    return normed(ops, hidden, embedding.norm, spec.norm)


def with_images(ops: ModuleType, hidden: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Hidden [T, H] with rows of the table [R, H] in place of those whose number is not below 0."""
    import paddle

    taken = ops.take(table, paddle.clip(rows, min=0)).astype(hidden.dtype)
    return paddle.where((rows >= 0).unsqueeze(1), taken, hidden)


def normed_over_ranks(ops: ModuleType, qkv: Tensor, attention: Attention) -> Tensor:
    """Queries, keys and values [T, N] behind norms over all heads of all ranks; as csrc has them.

    A key head counts as often as query heads read it: once for each of its group, of all ranks.
    """
    import paddle

    block, norm = attention.block, attention.block.qk_norm
    assert norm is not None
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    sizes = [block.q_size, block.kv_size, block.kv_size]
    q, k, v = paddle.split(qkv.astype("float32"), sizes, axis=-1)
    group = block.num_heads // block.num_kv_heads
    squares = [(q * q).sum(axis=-1, keepdim=True), (k * k).sum(axis=-1, keepdim=True) * group]
    sums = ops.sum_ranks(paddle.concat(squares, axis=-1))
    factors = paddle.rsqrt(sums / (block.all_heads * block.head_dim) + norm.epsilon)
    parts = []
    for part, (x, weights) in enumerate(((q, attention.q_norm), (k, attention.k_norm))):
        weight = weights.weight.astype("float32") + (1.0 if norm.plus_one else 0.0)
        parts.append(x * factors[:, part : part + 1] * weight)
    return paddle.concat([*parts, v], axis=-1).astype(qkv.dtype)


def of_all_tokens(ops: ModuleType, logits: Tensor, share: Share | None) -> Tensor:
    """Logits [L, V] of all ranks' [L, rows]."""
    if share is None:
        return logits
    ranges = map(share.tokens, range(share.ranks.size))
    return ops.gather_ranks(logits, [end - begin for begin, end in ranges])


def whole(ops: ModuleType, outputs: StepOutputs) -> StepOutputs:
    """The outputs with the logits of all tokens, which ranks send each other."""
    if outputs.share is None or outputs.logits is None:
        return outputs
    logits = of_all_tokens(ops, outputs.logits, outputs.share)
    return outputs._replace(logits=logits, share=None)


def before_head(ops: ModuleType, hidden: Tensor, head: Head) -> Tensor:
    """The input of the head's matrix, from hidden [L, H]."""
    hidden = normed(ops, hidden, head.norm, head.spec.norm)
    return hidden if head.projection is None else ops.linear(hidden, head.projection)
