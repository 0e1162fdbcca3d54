"""Drafters that read a model's hidden states: their weights, and a step over them.

R rows, H hidden size, V tokens, D tokens that a drafter knows. `ops`: a backend, as for
predict.nn.decoder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.nn.blocks import Activation, BlockStep, Linear, Norm, NormWeights, normed
from predict.nn.decoder import Embedding, Head, Layer, StepOutputs
from predict.nn.inputs import LayerCache, RowKind, StepInputs
from predict.nn.spec import Share

if TYPE_CHECKING:
    from paddle import Tensor


FED = "fed"  # the tap of a chain drafter's own states
MEDUSA_TAPS = ("norm",)
SILU = Activation(gated=False)


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


class Feed:
    """The states that a drafter's next step reads, on the host: rows of what an earlier one gave.

    Its twin on a GPU is predict.engine.runner.gpu_feed.
    """

    def __init__(self, ops: ModuleType):
        self.ops = ops
        self._hidden: Mapping[str, Tensor] = {}
        self._rows: Tensor | None = None

    def give(self, hidden: Mapping[str, Tensor], taps: Sequence[str], rows: Sequence[int]) -> None:
        """Takes the states of these taps, of which these rows are the next step's."""
        import paddle

        self._hidden = hidden
        self._rows = paddle.to_tensor(np.array(rows, np.int32), place=paddle.CPUPlace())

    def states(self, taps: Sequence[str], num_rows: int) -> Tensor:
        """[num_rows, P * H] of P taps, side by side."""
        return self.beside([self.ops.take(self._hidden[tap], self._rows) for tap in taps])

    def beside(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors [R, H] side by side."""
        import paddle

        return parts[0] if len(parts) == 1 else paddle.concat(list(parts), axis=1)


class ChainForward:
    """Runs a chain drafter over its own caches. See predict.engine.runner.networks.Forward.

    The inputs' tokens are those behind the places of the states that `feed` has. With the taps of
    the model these are the model's; with FED they are those that an earlier call returned: hidden
    has them by FED, [L, H], for the rows behind the logit rows.
    """

    def __init__(
        self, ops: ModuleType, drafter: ChainDrafter, caches: Sequence[LayerCache], feed: Any
    ):
        """feed: a Feed, or its twin."""
        self.ops, self.drafter, self.caches, self.feed = ops, drafter, caches, feed
        # Of one of several ranks the logits are its own tokens'. See StepOutputs.share.
        self.share = drafter.head.share if drafter.columns is None else None
        self.head = _apart(drafter.head, self.share)
        self._bound = ops.BoundLayers(drafter.layers, caches, drafter.ropes)
        self._tap_norms = _stacked(drafter.tap_norms)

    def __call__(self, inputs: StepInputs, rows: int, taps: Sequence[str] = ()) -> StepOutputs:
        ops, head, form = self.ops, self.head, self.drafter.form
        states = self.feed.states(taps, inputs.token_ids.shape[0])
        if form.reads_both and FED not in taps:
            states = self._joined(states)
        output = self._layers(inputs, states)
        if rows == RowKind.NONE:
            return StepOutputs(None)
        if rows != RowKind.ALL:
            output = ops.take(output, inputs.logit_indices)
        fed = ops.before_head(output, head) if form.feeds_normed else output
        return StepOutputs(ops.logits(output, head), {FED: fed}, share=self.share)

    def _joined(self, states: Tensor) -> Tensor:
        """One state [R, H] of those of all taps, side by side."""
        ops, drafter, norm = self.ops, self.drafter, self.drafter.form.norm
        states = normed(ops, states, self._tap_norms, norm)
        states = normed(ops, states, drafter.taps_norm, norm)
        return states if drafter.product is None else ops.linear(states, drafter.product)

    def _layers(self, inputs: StepInputs, states: Tensor) -> Tensor:
        """What the layers give, [R, H]."""
        ops, drafter, form = self.ops, self.drafter, self.drafter.form
        token = ops.embed(inputs, drafter.embedding, drafter.tied)
        token = normed(ops, token, drafter.token_norm, form.norm)
        state = normed(ops, states, drafter.state_norm, form.norm)
        both = self.feed.beside([token, state] if form.token_first else [state, token])
        if form.reads_both:
            return self._read_both(both, state if form.adds_normed else states, inputs)
        assert drafter.product is not None
        hidden: Tensor = self._bound(ops.linear(both, drafter.product), inputs)
        return hidden

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
        for block in others:  # without a cache
            hidden, _ = ops.block(hidden, block, BlockStep(inputs=inputs))
        return hidden


class MedusaForward:
    """Runs one of Medusa's heads, the one that the only tap names, on the states of `feed`.

    See predict.engine.runner.networks.Forward. Logits [R, V] are of the token of place i + 2 + head
    for a state of place i; of the inputs it reads how many rows there are.
    """

    def __init__(self, ops: ModuleType, heads: MedusaHeads, feed: Any):
        """feed: a Feed, or its twin."""
        self.ops, self.heads, self.feed = ops, heads, feed
        # As ChainForward's: heads have the model's matrix, or all matrices of their own.
        self.share = heads.heads[0].share if heads.columns is None else None
        self._of_logits = [_apart(head, self.share) for head in heads.heads]

    def __call__(self, inputs: StepInputs, rows: int, taps: Sequence[str] = ()) -> StepOutputs:
        (tap,), ops = taps, self.ops
        head = int(tap)
        states = self.feed.states(MEDUSA_TAPS, inputs.token_ids.shape[0])
        for linear in self.heads.blocks[head]:
            states = ops.add(states, ops.activate(ops.linear(states, linear), SILU))
        return StepOutputs(ops.logits(states, self._of_logits[head]), share=self.share)


def _apart(head: Head, share: Share | None) -> Head:
    """The head, whose logits are of a rank's own tokens where `share` says which."""
    return head if share is None else replace(head, share=None)


def _stacked(norms: Sequence[NormWeights]) -> NormWeights | None:
    """The norms of parts of a row, side by side: see the operator `norm`."""
    import paddle

    return NormWeights(paddle.stack([each.weight for each in norms])) if norms else None
