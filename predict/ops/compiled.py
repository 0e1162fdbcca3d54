"""The compiled operators, one documented function each; `predict.ops.plain` has their plain twins.

T tokens, H hidden size, L logit rows, V vocabulary, R rotary dims. Activations and weights are
float32, bfloat16 or float16, all alike in one call; sums are float32. Index tensors are int32.
Every function raises the operator's own ValueError when shapes or dtypes do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.device import library

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.decoder import Attention, Layer, Linear, Mlp
    from predict.nn.inputs import ForwardInputs, LayerCache


@cache
def _run() -> Callable[..., Any]:
    """Paddle's custom-op entry, once the library is loaded; works eagerly and while tracing."""
    library.require()
    from paddle import _C_ops

    return _C_ops._run_custom_op


def _step(inputs: ForwardInputs) -> tuple[Tensor, ...]:
    """What the operators with attention read of a step, in their order."""
    return (
        inputs.positions,
        inputs.slot_mapping,
        inputs.cu_seqlens_q,
        inputs.context_lens,
        inputs.block_tables,
        inputs.max_lens,
    )


def pack_dense(weight: Tensor, dtype: str) -> Tensor:
    """Packs weight [N, K] (any float dtype) into the layout that `linear` reads, in `dtype`.

    On the CPU float32 and float16 become [ceil(N/32), K, 32], bfloat16 [ceil(N/32), ceil(K/2), 32,
    2], zero padded. A GPU multiplies matrices as checkpoints store them: there it stays [N, K].
    """
    return _run()("regatta_pack_dense", weight, True, dtype)[0]


def pack_quantized(
    codes: Tensor, scale: Tensor, zero: Tensor | None, scheme: str, dtype: str
) -> tuple[Tensor, Tensor]:
    """Packs codes [N, K] into the layout that `linear` reads for `scheme`, where they lie.

    codes: int8, or uint8 bits of e4m3; scale: float32, see predict.schemes.Quantized; zero: float32
    [N, G]; dtype: the activations'. Returns packed (uint8) and scales, the backend's own layouts.
    """
    packed, scales = _run()("regatta_pack_quantized", codes, scale, zero, scheme, dtype)
    return packed, scales


def fold_norm(weight: Tensor, norm: Tensor) -> None:
    """Multiplies the columns of weight [N, K] by norm [K], in place; GPUs only."""
    _run()("regatta_fold_norm", weight, norm)


def embedding(token_ids: Tensor, weight: Tensor | None, head: Linear) -> Tensor:
    """Rows of weight [V, H], or of the LM head where weight is None. Returns [T, H]."""
    table = head.tensors[0] if weight is None else weight
    packed = len(table.shape) > 2  # the CPU's layout of a matrix; a GPU takes [V, H]
    return _run()("regatta_embedding", token_ids, table, packed, head.in_features)[0]


def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Returns s / sqrt(mean(s^2) + epsilon) * weight and s = x + residual (or x), both [T, H]."""
    out, total = _run()("regatta_rms_norm", x, weight, residual, epsilon)
    return out, total


def linear(x: Tensor, weights: Linear) -> Tensor:
    """X [T, K] times the weight as `pack_dense` made it, plus bias. Returns [T, N]."""
    return _run()(
        "regatta_linear", x, weights.tensors, weights.bias, weights.scheme, weights.out_features
    )[0]


def rope_and_cache_write(
    qkv: Tensor,
    attention: Attention,
    cache: LayerCache,
    rope: Tensor,
    inputs: ForwardInputs,
) -> tuple[Tensor, list[Tensor]]:
    """Rotates queries and keys, writes keys and values to their slots (-1 writes nothing).

    qkv: [T, (num_heads + 2 num_kv_heads) * head_dim]. rope: [positions, R] float32. With q_norm and
    k_norm each head is RMS-normalised first. Returns q [T, num_heads * head_dim] and the layer's
    cache tensors (attention.kv_format says which), modified in place.
    """
    q, *written = _run()(
        "regatta_rope_and_cache_write",
        qkv,
        inputs.positions,
        inputs.slot_mapping,
        rope,
        attention.q_norm,
        attention.k_norm,
        list(cache),
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.norm_eps,
        attention.kv_format,
    )
    return q, written


def paged_attention(
    q: Tensor,
    attention: Attention,
    cache: LayerCache,
    inputs: ForwardInputs,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged spans over a paged cache.

    Token i of span b (n tokens) sits at position context_lens[b] - n + i and sees positions up to
    its own, at most `window` of them. q, result: [T, num_heads * head_dim].
    tree_mask: [T, words] int32; bit j of a token's row (the lowest of word 0 first) says whether it
    sees token j of its own span, instead of all up to itself; its last bit is its own. Spans of
    more than 32 * words tokens are no trees. A tree's windows count from a token's depth.
    """
    return _run()(
        "regatta_paged_attention",
        q,
        list(cache),
        inputs.cu_seqlens_q,
        inputs.context_lens,
        inputs.block_tables,
        inputs.max_lens,
        tree_mask,
        attention.num_heads,
        attention.softmax_scale,
        attention.window,
        attention.kv_format,
    )[0]


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copies blocks of caches [N, ...], in place: (from, to), no block both.

    The caches are of one device, and their blocks multiples of 16 bytes.
    """
    import paddle

    pairs = paddle.to_tensor(np.array(copies, np.int32), place=paddle.CPUPlace())
    _run()("regatta_copy_blocks", list(caches), pairs)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2I] (gate first). Returns [T, I]."""
    return _run()("regatta_silu_mul", gate_up)[0]


def attention_block(
    hidden: Tensor,
    attention: Attention,
    cache: LayerCache,
    rope: Tensor,
    inputs: ForwardInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Hidden [T, H] + attention(norm(hidden)), in one call; the cache is modified in place.

    Composes rms_norm, linear, rope_and_cache_write, paged_attention and linear. rows: [L] int32,
    at least one, GPUs only: these alone are returned, [L, H]; as many as tokens must be all of
    them in order, as many as spans the last ones of each.
    """
    hidden, *written = _run()(
        "regatta_attention_block",
        hidden,
        attention.norm,
        attention.qkv.tensors,
        attention.qkv.bias,
        attention.q_norm,
        attention.k_norm,
        attention.out.tensors,
        attention.out.bias,
        list(cache),
        rope,
        *_step(inputs),
        tree_mask,
        rows,
        _schemes(attention.qkv, attention.out),
        attention.num_heads,
        attention.num_kv_heads,
        attention.head_dim,
        attention.norm_eps,
        attention.softmax_scale,
        attention.window,
        attention.kv_format,
    )
    return hidden, written


def mlp_block(hidden: Tensor, mlp: Mlp) -> Tensor:
    """Hidden [T, H] + down(silu(gate) * up), gate and up of norm(hidden), in one call."""
    return _run()(
        "regatta_mlp_block",
        hidden,
        mlp.norm,
        mlp.gate_up.tensors,
        mlp.gate_up.bias,
        mlp.down.tensors,
        mlp.down.bias,
        _schemes(mlp.gate_up, mlp.down),
        mlp.intermediate_size,
        mlp.norm_eps,
    )[0]


def _schemes(*linears: Linear) -> str:
    """Their scheme, or where they differ their schemes joined by commas, in order."""
    names = [linear.scheme for linear in linears]
    return names[0] if len(set(names)) == 1 else ",".join(names)


def _layer_kind(layer: Layer) -> list[tuple[str, bool]]:
    """What layers of one regatta_decoder_layers call must share, besides shapes."""
    attention, mlp = layer.attention, layer.mlp
    linears = (attention.qkv, attention.out, mlp.gate_up, mlp.down)
    return [(linear.scheme, linear.bias is not None) for linear in linears]


def _layer_tensors(layer: Layer) -> list[Tensor]:
    """A layer's tensors in the order that regatta_decoder_layers takes them."""
    attention, mlp = layer.attention, layer.mlp
    tensors = (
        attention.norm,
        *attention.qkv.tensors,
        attention.qkv.bias,
        attention.q_norm,
        attention.k_norm,
        *attention.out.tensors,
        attention.out.bias,
        mlp.norm,
        *mlp.gate_up.tensors,
        mlp.gate_up.bias,
        *mlp.down.tensors,
        mlp.down.bias,
    )
    return [tensor for tensor in tensors if tensor is not None]


@dataclass(frozen=True)
class _Run:
    """Layers that share a call of regatta_decoder_layers."""

    first: Layer
    windows: list[int]
    weights: list[Tensor]
    caches: list[Tensor]

    def __call__(
        self, hidden: Tensor, rope: Tensor, inputs: ForwardInputs, tree_mask: Tensor | None
    ) -> list[Tensor]:
        """Hidden [T, H] behind these layers, and their caches."""
        attention, mlp = self.first.attention, self.first.mlp
        return _run()(
            "regatta_decoder_layers",
            hidden,
            self.weights,
            self.caches,
            rope,
            *_step(inputs),
            tree_mask,
            _schemes(attention.qkv, attention.out, mlp.gate_up, mlp.down),
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
            mlp.intermediate_size,
            attention.norm_eps,
            attention.softmax_scale,
            self.windows,
            len(attention.qkv.tensors),
            attention.qkv.bias is not None,
            attention.q_norm is not None,
            attention.out.bias is not None,
            mlp.gate_up.bias is not None,
            attention.kv_format,
        )


def _runs(layers: Sequence[Layer], caches: Sequence[LayerCache]) -> Iterator[_Run]:
    start = 0
    for _, alike in groupby(layers, _layer_kind):
        run = list(alike)
        yield _Run(
            run[0],
            [layer.attention.window for layer in run],
            [tensor for layer in run for tensor in _layer_tensors(layer)],
            [tensor for cache in caches[start : start + len(run)] for tensor in cache],
        )
        start += len(run)


def layers(
    hidden: Tensor,
    layers: Sequence[Layer],
    caches: Sequence[LayerCache],
    rope: Tensor,
    inputs: ForwardInputs,
    tree_mask: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """`attention_block`, then `mlp_block`, of layer after layer.

    Layers that differ in weights and windows only share a call. Returns hidden [T, H] and the
    caches (the tensors of layer after layer), modified in place.
    """
    written: list[Tensor] = []
    for run in _runs(layers, caches):
        hidden, *caches_out = run(hidden, rope, inputs, tree_mask)
        written += caches_out
    return hidden, written


class BoundLayers:
    """`layers` of always the same tensors, which are gathered once.

    On the CPU the operator reads where they are from one list, in place of some hundred arguments:
    a fourteenth of a small model's step.
    """

    def __init__(self, layers: Sequence[Layer], caches: Sequence[LayerCache]):
        import paddle

        self._runs = list(_runs(layers, caches))
        self._kept = [(run.weights, run.caches) for run in self._runs]  # the lists do not
        if paddle.get_device() == "cpu":
            call = _run()
            self._runs = [
                replace(
                    run,
                    weights=call("regatta_views", run.weights),
                    caches=call("regatta_views", run.caches),
                )
                for run in self._runs
            ]

    def __call__(
        self, hidden: Tensor, rope: Tensor, inputs: ForwardInputs, tree_mask: Tensor | None = None
    ) -> Tensor:
        """Hidden [T, H] behind the layers; the caches are modified in place."""
        for run in self._runs:
            hidden = run(hidden, rope, inputs, tree_mask)[0]
        return hidden


def logits(
    hidden: Tensor, norm: Tensor, head: Linear, logit_indices: Tensor | None, epsilon: float
) -> Tensor:
    """float32 logits [L, V] of the normalised rows `logit_indices` (or all) of hidden [T, H]."""
    return _run()(
        "regatta_logits",
        hidden,
        norm,
        head.tensors,
        logit_indices,
        head.scheme,
        head.out_features,
        epsilon,
    )[0]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seeds: Tensor,
    offsets: Tensor,
    min_p: Tensor | None = None,
    typical_p: Tensor | None = None,
) -> Tensor:
    """One token per row of logits [L, V] float32. Returns [L] int32.

    temperature [L] float32 (0: the largest logit, lowest index on ties), top_k [L] int32 (0: all),
    top_p [L] float32, then min_p [L] float32 (None: 0, all) and typical_p [L] float32 (None: 1,
    all) of what these keep; seeds [L] int64, offsets [L] int64: the row's random number is the
    first word of philox4x32-10(key = seed, counter = offset). A row that cannot be drawn from (a
    NaN; no finite largest logit, unless greedy) yields -1.
    """
    columns = temperature, top_k, top_p, seeds, offsets, min_p, typical_p
    return _run()("regatta_sample", logits, *columns)[0]


def mask_logits(logits: Tensor, masks: Tensor) -> Tensor:
    """Bans tokens on rows of logits [L, V] float32, in place, and returns the logits.

    masks [R, W] int32, R at least L, 32 W at least V: bit v % 32 of word v / 32 is 1 where token v
    may be chosen; the others get -inf.
    """
    _run()("regatta_mask_logits", logits, masks)
    return logits


def log_softmax(logits: Tensor, rows: Tensor) -> None:
    """Turns `rows` [B] of logits [L, V] into log-probabilities, in place; GPUs only."""
    _run()("regatta_log_softmax", logits, rows)


def likeliest(logits: Tensor, rows: Tensor, count: int) -> Tensor:
    """The `count` largest of each of `rows` [B] of logits [L, V] that are above -inf; GPUs only.

    Returns [2, B, count] int32: token ids, the lower first on ties, and their values, floats by
    their bits. Behind the last one, and for a row with a NaN, token ids are -1.
    """
    return _run()("regatta_likeliest", logits, rows, count)[0]


def resolve_tokens(token_ids: Tensor, last_tokens: Tensor) -> None:
    """Puts last_tokens[r] where token_ids [T] is -1 - r, in place; GPUs only."""
    _run()("regatta_resolve_tokens", token_ids, last_tokens)


def follow_drafts(
    inputs: ForwardInputs, choices: Tensor, plan: Tensor, tokens: Tensor, block_size: int
) -> None:
    """Moves a draft model's step to where the target's verification got, in place; GPUs only.

    inputs: made as if all drafts had been right. choices: of `sample_step`, a column per request.
    plan [B, W] int32: of each request the number of its drafts (-1: it stays), the row of the first
    choice, how many of its tokens are choices (0 or 2), and where its drafts are; rows and places
    among `tokens` [R] int32, the target's.
    """
    _run()(
        "regatta_follow_drafts",
        *(inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.context_lens, choices),
        *(inputs.cu_seqlens_q, inputs.block_tables, plan, tokens, block_size),
    )


def adjust_logits(
    logits: Tensor,
    penalties: Tensor,
    token_ids: Tensor,
    logit_indices: Tensor,
    history: Tensor,
    rules: Tensor,
) -> None:
    """Biases, penalties and bans on logits [L, V], in place; GPUs only.

    penalties [8, P] int32, P at least L: rows of repetition, presence and frequency penalty, floats
    by their bits; the slot, a row of `history` [S, M] int32 that holds the request's tokens and of
    `rules` [S, W] int32 (-1: the logits stay as they are); how many tokens the request has up to
    this row, how many of them are the prompt's, how many are new in this step;
    no_repeat_ngram_size. New tokens are those up to token_ids[logit_indices]; the newest is put
    into the history. rules: see csrc/include/regatta/adjust_logits.h.
    """
    _run()("regatta_adjust_logits", logits, penalties, token_ids, logit_indices, history, rules)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """How likely each row of logits [L, V] makes its token, and the likeliest ones; GPUs only.

    token_ids [R] int32, R at least L. Returns [L, 2 + 2 num_top] int32, floats by their bits: the
    token's logprob, 1 + the number of likelier tokens, the num_top (at most 32) likeliest tokens,
    -1 behind the last one, and their logprobs. Any values for a row with a NaN.
    """
    return _run()("regatta_logprobs", logits, token_ids, num_top)[0]


def sample_step(logits: Tensor, choices: Tensor, last_tokens: Tensor) -> None:
    """`sample` into the first L entries of last_tokens [R] int32, in place; GPUs only.

    choices [10, P] int32, P even and at least L: rows of temperature, top_k, top_p and min_p,
    floats by their bits; then seeds and offsets, int64, in two rows' space each; then typical_p;
    then what `verify_window` takes. A row of logits that cannot be drawn from yields -1.
    """
    _run()("regatta_sample_step", logits, choices, last_tokens)


def verify_window(
    logits: Tensor,
    choices: Tensor,
    token_ids: Tensor,
    logit_indices: Tensor,
    last_tokens: Tensor,
    window: int,
    max_candidate_len: int,
) -> None:
    """Puts drafts that stand in the place of what `sample_step` drew there, in place; GPUs only.

    They stand as predict.engine.window says. The last row of `choices` [10, P] has the drafts
    from each row of logits [L, V] on: n, n - 1, ..., 0 in a span with n drafts, 0 where what was
    drawn stays. Row r's draft is token_ids[logit_indices[r] + 1].
    """
    _run()(
        *("regatta_verify_window", logits, choices, token_ids, logit_indices, last_tokens),
        *(window, max_candidate_len),
    )
