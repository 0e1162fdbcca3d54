"""Blocks with a state per request, in plain Paddle, token by token: twins of csrc/blocks.

T tokens, C channels, W taps; K, V, D, E of predict.nn.kinds.delta_net. Request i begins with the
state of slot inputs.state_src[i] (-1: zeros), and leaves its state in slot state_dst[i] (-1: none).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.inputs import LayerCache, StepInputs
    from predict.nn.kinds.delta_net import DeltaNet
    from predict.nn.kinds.short_conv import ShortConv

UNIT_EPSILON = 1e-6  # of the sums of squares of queries and keys


class _Span(NamedTuple):
    """A request's tokens in the step, and its slots."""

    begin: int
    end: int
    src: int
    dst: int


def _spans(inputs: StepInputs) -> Iterator[_Span]:
    borders, src, dst = (
        each.numpy().tolist() for each in (inputs.cu_seqlens_q, inputs.state_src, inputs.state_dst)
    )
    return (_Span(*each) for each in zip(borders, borders[1:], src, dst, strict=False))


def _before(states: Tensor, span: _Span) -> Tensor:
    """The state that a request begins with."""
    import paddle

    return paddle.zeros(states.shape[1:], "float32") if span.src < 0 else states[span.src]


def _keep(states: Tensor, span: _Span, state: Tensor) -> None:
    if span.dst >= 0:
        states[span.dst] = state


def _convolved(x: Tensor, taps: Tensor, bias: Tensor | None, states: Tensor, span: _Span) -> Tensor:
    """The causal convolution of x [n, C], a request's, by taps [W, C]; keeps its last columns."""
    import paddle

    columns = paddle.concat([_before(states, span), x])
    count, width = x.shape[0], taps.shape[0]
    made = taps[0] * columns[:count]
    for tap in range(1, width):
        made = made + taps[tap] * columns[tap : tap + count]
    _keep(states, span, columns[count:])
    return made if bias is None else made + bias


def short_conv(
    bcx: Tensor, weights: ShortConv, states: LayerCache, inputs: StepInputs
) -> tuple[Tensor, list[Tensor]]:
    """Returns c * conv(b * x) [T, size]; bcx [T, 3 * size]; states [slots, W - 1, size], kept."""
    import paddle

    size = weights.block.size
    b, c, x = paddle.split(bcx.astype("float32"), [size] * 3, axis=-1)
    made = [
        _convolved((b * x)[s.begin : s.end], weights.taps, weights.taps_bias, states[0], s)
        for s in _spans(inputs)
    ]
    return (c * paddle.concat(made)).astype(bcx.dtype), list(states)


def delta_net(
    qkvz: Tensor, ba: Tensor, weights: DeltaNet, states: LayerCache, inputs: StepInputs
) -> tuple[Tensor, list[Tensor]]:
    """The input [T, V * E] of the last product. See DeltaNetBlock.

    qkvz [T, conv_size + V * E], ba [T, ...]: the first products. states: [slots, W - 1, conv_size]
    and [slots, V, D, E], in place.
    """
    import paddle

    block, functions = weights.block, paddle.nn.functional
    conv_states, kept = states
    x, z = paddle.split(qkvz.astype("float32"), [block.conv_size, block.value_size], axis=-1)
    decays, strengths = _gates(ba.astype("float32"), weights)
    made = []
    for span in _spans(inputs):
        part = slice(span.begin, span.end)
        y = functions.silu(_convolved(x[part], weights.conv, weights.conv_bias, conv_states, span))
        state, outputs = _before(kept, span), []
        q, k, v = _heads(y, weights)
        for t in range(span.end - span.begin):
            state = state * paddle.exp(decays[span.begin + t]).unsqueeze(-1)
            seen = v[t]
            if block.delta:
                seen = seen - (state * k[t].unsqueeze(-1)).sum(axis=1)
            written = strengths[span.begin + t].unsqueeze(-1) * seen
            state = state + k[t].unsqueeze(-1) * written.unsqueeze(1)
            outputs.append((state * q[t].unsqueeze(-1)).sum(axis=1))
        _keep(kept, span, state)
        o = paddle.stack(outputs)
        made.append(o if weights.skip is None else o + weights.skip.unsqueeze(-1) * v)
    return _gated(paddle.concat(made).flatten(1), z, weights).astype(qkvz.dtype), list(states)


def _gates(ba: Tensor, weights: DeltaNet) -> tuple[Tensor, Tensor]:
    """The logarithms of decays, [T, V, 1] or [T, V, D], and what is written's strengths [T, V]."""
    import paddle

    block, functions = weights.block, paddle.nn.functional
    heads = block.num_value_heads
    a = (ba[:, -block.decay_size :] + weights.step_bias).reshape(
        [-1, heads, block.decay_size // heads]
    )
    rate = paddle.exp(weights.decay).unsqueeze(-1)
    step = functions.softplus(a, threshold=20.0)
    bound = block.decay_bound
    decays = bound * functions.sigmoid(rate * a) if bound else -rate * step
    if block.write == "step":
        return decays, step[:, :, 0] * block.write_scale
    return decays, functions.sigmoid(ba[:, :heads]) * block.write_scale


def _heads(y: Tensor, weights: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys [n, V, D] of each value head, and values [n, V, E]."""
    import paddle

    block = weights.block
    sizes = [block.key_size, block.key_size, block.value_size]
    q, k, v = paddle.split(y, sizes, axis=-1)
    group = block.num_value_heads // block.num_key_heads

    def by_value_head(x: Tensor) -> Tensor:
        x = x.reshape([-1, block.num_key_heads, block.key_dim])
        if block.unit_keys:
            x = x * paddle.rsqrt((x * x).sum(axis=-1, keepdim=True) + UNIT_EPSILON)
        if block.tiled_heads:
            return paddle.tile(x, [1, group, 1])
        return paddle.repeat_interleave(x, group, axis=1)

    q = by_value_head(q) * (block.key_dim**-0.5 if block.unit_keys else 1.0)
    return q, by_value_head(k), v.reshape([-1, block.num_value_heads, block.value_dim])


def _gated(o: Tensor, z: Tensor, weights: DeltaNet) -> Tensor:
    """The norm of o [T, V * E] and its gate, in their order."""
    import paddle

    block, functions = weights.block, paddle.nn.functional
    gate = functions.silu(z) if block.gate == "silu" else functions.sigmoid(z)
    if block.gate_first:
        o = o * gate
    groups = block.norm_groups or block.num_value_heads
    parts = o.reshape([-1, groups, block.value_size // groups])
    square = (parts * parts).mean(axis=-1, keepdim=True)
    normed = parts * paddle.rsqrt(square + block.out_norm.epsilon)
    if block.norm_groups:
        normed = normed.flatten(1) * weights.out_norm
    else:
        normed = (normed * weights.out_norm).flatten(1)
    return normed if block.gate_first else normed * gate
