"""Drafters that read a model's hidden states: their weights, and a step over them.

R rows, H hidden size, V tokens, D tokens that a drafter knows. `ops`: a backend, as for
predict.nn.decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.nn.blocks import BlockStep, Linear, Norm, NormWeights, normed
from predict.nn.decoder import Decoder, Embedding, Head, Layer
from predict.nn.inputs import HostTensors, LayerCache, StepInputs

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True)
class ChainForm:
    """How a chain drafter's row comes about: of the state at a place, and of the token behind it.

    taps: of the model's states; several, or one with a product of its own, become one state.
    reads_both: the first layer's attention reads token and state side by side, and adds to the
    state (EAGLE-3); else one product of both is the layers' input (EAGLE-1, MTP). token_first: of
    the two. feeds_normed: the next row's state is the output behind the last norm, not ahead of it.
    adds_normed: the attention adds to the normed state. norm: of all norms but the layers' own.
    """

    taps: tuple[str, ...]
    reads_both: bool = False
    token_first: bool = True
    feeds_normed: bool = False
    adds_normed: bool = False
    norm: Norm = Norm()


@dataclass(frozen=True, slots=True)
class ChainDrafter:
    """Weights of a drafter that makes each draft of its own last output."""

    form: ChainForm
    embedding: Embedding
    tied: Linear  # the rows of the embedding, where its table is None
    layers: tuple[Layer, ...]
    head: Head  # its norm is behind the layers
    ropes: tuple[Tensor, ...]
    product: Linear | None = None
    tap_norms: tuple[NormWeights, ...] = ()  # of each tap
    taps_norm: NormWeights | None = None  # of all taps side by side
    token_norm: NormWeights | None = None
    state_norm: NormWeights | None = None
    columns: Tensor | None = None  # [V] column of the head's logits; D where there is none


@dataclass(frozen=True, slots=True)
class MedusaHeads:
    """Weights of heads on the final state, a head for each draft: x + silu(W x + b), then a matrix.

    blocks: of each head, its layers.
    """

    blocks: tuple[tuple[Linear, ...], ...]
    heads: tuple[Head, ...]
    columns: Tensor | None = None


class ChainNetwork:
    """Runs a chain drafter over its own caches, on the host."""

    def __init__(self, ops: ModuleType, drafter: ChainDrafter, caches: Sequence[LayerCache]):
        self.ops, self.drafter, self.caches = ops, drafter, caches
        self.taps = drafter.form.taps
        self._bound = ops.BoundLayers(drafter.layers, caches, drafter.ropes)
        self._placed = HostTensors()

    def states(self, hidden: Mapping[str, Tensor], rows: Sequence[int]) -> Tensor:
        """The states [R, H] of these rows of a model's step."""
        ops, drafter = self.ops, self.drafter
        index = _rows(rows)
        taken = [ops.take(hidden[tap], index) for tap in self.taps]
        if not drafter.form.reads_both:
            return taken[0]
        norm = drafter.form.norm
        if drafter.tap_norms:
            taken = [
                ops.norm(x, weights, norm)
                for x, weights in zip(taken, drafter.tap_norms, strict=True)
            ]
        joined = normed(ops, _beside(taken), drafter.taps_norm, norm)
        return joined if drafter.product is None else ops.linear(joined, drafter.product)

    def run(self, inputs: StepInputs, states: Tensor) -> Tensor:
        """The layers' output [R, H] of NumPy inputs, whose tokens are those behind the places."""
        import paddle

        ops, drafter, form = self.ops, self.drafter, self.drafter.form
        given = self._placed.filled(inputs)
        with paddle.no_grad():
            token = ops.embed(given, drafter.embedding, drafter.tied)
            token = normed(ops, token, drafter.token_norm, form.norm)
            state = normed(ops, states, drafter.state_norm, form.norm)
            both = _beside([token, state] if form.token_first else [state, token])
            if not form.reads_both:
                assert drafter.product is not None
                hidden: Tensor = self._bound(ops.linear(both, drafter.product), given)
                return hidden
            return self._read_both(both, state if form.adds_normed else states, given)

    def _read_both(self, both: Tensor, residual: Tensor, inputs: StepInputs) -> Tensor:
        ops: Any = self.ops
        step = BlockStep(self.caches[0], self.drafter.ropes, inputs)
        attention, *others = self.drafter.layers[0]
        weights: Any = attention
        qkv = weights.product(ops, both, "qkv", step)
        query, written = ops.rope_and_cache_write(qkv, weights, step.cache, step.ropes, inputs)
        mixed = ops.paged_attention(query, weights, tuple(written), inputs, None)
        made = weights.product(ops, mixed, "out", step)
        hidden = ops.add(residual, ops.sum_ranks(made) if weights.block.partial else made)
        for block in others:
            hidden, _ = block.run(ops, hidden, step)
        return hidden

    def fed(self, output: Tensor) -> Tensor:
        """The states of the rows behind those that gave this output."""
        form = self.drafter.form
        return self.ops.before_head(output, self.drafter.head) if form.feeds_normed else output

    def logits(self, output: Tensor) -> Tensor:
        """float32 [R, V] of an output; -inf for tokens that the drafter does not know."""
        return _spread(self.ops.logits(output, self.drafter.head), self.drafter.columns)


class MedusaNetwork:
    """Runs Medusa heads, on the host."""

    taps: tuple[str, ...] = ("norm",)

    def __init__(self, ops: ModuleType, heads: MedusaHeads):
        self.ops, self.heads = ops, heads
        self.num_heads = len(heads.heads)

    def states(self, hidden: Mapping[str, Tensor], rows: Sequence[int]) -> Tensor:
        """The states [R, H] of these rows of a model's step."""
        return self.ops.take(hidden[self.taps[0]], _rows(rows))

    def logits(self, states: Tensor, head: int) -> Tensor:
        """float32 [R, V]: of the token of place i + 2 + head, for states of place i."""
        import paddle

        with paddle.no_grad():
            for linear in self.heads.blocks[head]:
                # A CPU's Paddle has silu in float32 alone.
                made = paddle.nn.functional.silu(self.ops.linear(states, linear).astype("float32"))
                states = self.ops.add(states, made.astype(states.dtype))
            logits = self.ops.logits(states, self.heads.heads[head])
        return _spread(logits, self.heads.columns)


def shared_embedding(decoder: Decoder) -> tuple[Embedding, Linear]:
    """A model's embedding, and the matrix that has its rows where they are the head's."""
    return decoder.embedding, decoder.head.linear


def _rows(rows: Sequence[int]) -> Tensor:
    import paddle

    return paddle.to_tensor(np.array(rows, np.int32), place=paddle.CPUPlace())


def _beside(parts: Sequence[Tensor]) -> Tensor:
    import paddle

    return parts[0] if len(parts) == 1 else paddle.concat(list(parts), axis=1)


def _spread(logits: Tensor, columns: Tensor | None) -> Tensor:
    import paddle

    if columns is None:
        return logits
    nothing = paddle.full([logits.shape[0], 1], -np.inf, logits.dtype)
    return paddle.index_select(paddle.concat([logits, nothing], axis=1), columns, axis=1)
