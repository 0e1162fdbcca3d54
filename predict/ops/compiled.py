"""The compiled operators, one documented function each; `predict.ops.plain` has their plain twins.

T tokens, H hidden size, L logit rows, V vocabulary, R rotary dims. Activations and weights are
float32, bfloat16 or float16, all alike in one call; sums are float32. Index tensors are int32.
Every function raises the operator's own ValueError when shapes or dtypes do not fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.device import library
from predict.nn.blocks import FUNCTIONS, NORM_KINDS, Activation, BlockStep, Norm, is_plain_rms
from predict.ops import composed, records

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.blocks import Block, BlockWeights, Linear, NormWeights
    from predict.nn.decoder import Embedding, Head, Layer
    from predict.nn.inputs import LayerCache, StepInputs
    from predict.nn.kinds.attention import Attention
    from predict.nn.spec import Share

_OPS = sys.modules[__name__]


@cache
def _run() -> Callable[..., Any]:
    """Paddle's custom-op entry, once the library is loaded; works eagerly and while tracing."""
    library.require()
    from paddle import _C_ops

    return _C_ops._run_custom_op


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
    return _rows(token_ids, weight, head)


def _rows(
    token_ids: Tensor,
    weight: Tensor | None,
    head: Linear,
    position_table: Tensor | None = None,
    positions: Tensor | None = None,
    scale: float = 1.0,
    image_table: Tensor | None = None,
    image_rows: Tensor | None = None,
) -> Tensor:
    table = head.tensors[0] if weight is None else weight
    packed = len(table.shape) > 2  # the CPU's layout of a matrix; a GPU takes [V, H]
    width = head.in_features if packed else table.shape[1]
    return _run()(
        *("regatta_embedding", token_ids, table, position_table, positions),
        *(image_table, image_rows, packed, width, scale),
    )[0]


def take(x: Tensor, rows: Tensor) -> Tensor:
    """Rows [L] of x [T, N]."""
    return _run()("regatta_embedding", rows, x, *(None,) * 4, False, x.shape[1], 1.0)[0]


def take_ids(ids: Tensor, rows: Tensor) -> Tensor:
    """Entries [L] of ids [T] int32, at `rows`."""
    return _run()("regatta_take_ids", ids, rows)[0]


def add(a: Tensor, b: Tensor | None, a_scale: float = 1.0, b_scale: float = 1.0) -> Tensor:
    """a_scale * a + b_scale * b of a and b [T, N], rounded once; without b nothing is added."""
    return _run()("regatta_add", a, b, a_scale, b_scale)[0]


def sum_ranks(x: Tensor) -> Tensor:
    """The sum of all ranks' x, in their order in float32 and rounded once; x where one runs."""
    return _run()("regatta_sum_ranks", x)[0]


def gather_ranks(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The first counts[r] columns of rank r's x [T, N], one behind the other: [T, sum of counts].

    On a GPU x is float32.
    """
    return _run()("regatta_gather_ranks", x, list(counts))[0]


def own_rows(token_ids: Tensor, begin: int, end: int, other: int) -> Tensor:
    """Rows [T] of a table of the tokens from `begin` to before `end`; `other` for other tokens."""
    return _run()("regatta_own_rows", token_ids, begin, end, other)[0]


def cut_patches(
    pixels: Tensor,
    origins: Tensor,
    strides: Tensor,
    sizes: tuple[int, int],
    scaling: tuple[float, Sequence[float], Sequence[float]],
    dtype: str,
) -> Tensor:
    """Patches [P, width] of pictures, of `dtype`; values [3, side, side], and zeros behind.

    pixels [N] uint8: [rows, columns, 3] of each picture, one behind the other. origins [P]: bytes
    ahead of a patch's first pixel; strides [P]: pixels of a row of its picture. sizes: side of a
    patch, width. scaling: factor, mean, std: (pixel * factor - mean) / std, float32, rounded once.
    """
    return _run()("regatta_cut_patches", pixels, origins, strides, *sizes, *scaling, dtype)[0]


def put_rows(table: Tensor, rows: Tensor, x: Tensor) -> None:
    """Writes x [C, W] to `rows` [C] of table [R, W], in place; no row comes twice."""
    _run()("regatta_put_rows", table, rows, x)


def write_places(table: Tensor, places: Tensor, axes: Sequence[int], first: int) -> Tensor:
    """Writes rows of a rotary table [P, R] for places in several dimensions, in place.

    Row first + t takes each of its R / 2 angles from the row places[t, axis], of the angle's axis.
    places: [T, 3] int32, each below `first`. Returns the table.
    """
    return _run()("regatta_write_places", table, places, list(axes), first)[0]


def embed(inputs: StepInputs, embedding: Embedding, head: Linear) -> Tensor:
    """The first layer's input [T, H]. head: the LM head's matrix, which may be the table."""
    composed_of = (embedding.projection, embedding.norm, embedding.share)
    if any(part is not None for part in composed_of):
        return composed.embed(_OPS, inputs, embedding, head)
    rows, scale = embedding.positions, embedding.spec.scale
    positions = None if rows is None else inputs.positions
    images = None if inputs.image_rows is None else embedding.images
    return _rows(
        *(inputs.token_ids, embedding.table, head, rows, positions, scale),
        *(images, inputs.image_rows),
    )


def take_or(x: Tensor, rows: Tensor, other: Tensor) -> Tensor:
    """Rows [L] of x [T, H]; `other` [1, H] where a row is below 0."""
    import paddle

    none, size = paddle.zeros_like(rows), x.shape[1]
    return _run()("regatta_embedding", none, other, None, None, x, rows, False, size, 1.0)[0]


def add_images(hidden: Tensor, table: Tensor, rows: Tensor) -> Tensor:
    """Hidden [T, H] plus rows [T] of the table [R, H]; where a row is below 0, nothing is added."""
    import paddle

    return add(hidden, take_or(table, rows, paddle.zeros([1, hidden.shape[1]], hidden.dtype)))


def norm(x: Tensor, weights: NormWeights, norm: Norm) -> Tensor:
    """The norm of x [T, N], rounded to its dtype.

    A weight [P, D] norms the first P parts of each row, D values each; those behind stay.
    """
    kind = NORM_KINDS.index(norm.kind)
    return _run()(
        "regatta_norm", x, weights.weight, weights.bias, None, kind, norm.epsilon, norm.plus_one
    )[0]


def rms_norm(
    x: Tensor, weight: Tensor, residual: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Returns s / sqrt(mean(s^2) + epsilon) * weight and s = x + residual (or x), both [T, H]."""
    out, total = _run()("regatta_norm", x, weight, None, residual, 0, epsilon, False)
    return out, total


def linear(x: Tensor, weights: Linear) -> Tensor:
    """X [T, K] times the weight as `pack_dense` made it, plus bias. Returns [T, N]."""
    return _run()(
        "regatta_linear", x, weights.tensors, weights.bias, weights.scheme, weights.out_features
    )[0]


def adapted_linear(x: Tensor, weights: Linear, ids: Tensor, pages: Tensor, row: int) -> Tensor:
    """As `linear`, plus the products of adapters.

    ids [T]: rows of pages [B, rows, R], below 0 without an adapter. pages[id, row]: the adapter's
    pages of weights.low_rank, below 0 behind the last one.
    """
    low_rank = weights.low_rank
    assert low_rank is not None
    return _run()(
        *("regatta_adapted_linear", x, weights.tensors, weights.bias, low_rank.a, low_rank.b),
        *(ids, pages, weights.scheme, list(low_rank.part_sizes), row),
    )[0]


def rope_and_cache_write(
    qkv: Tensor,
    attention: Attention,
    cache: LayerCache,
    ropes: Sequence[Tensor],
    inputs: StepInputs,
) -> tuple[Tensor, list[Tensor]]:
    """Rotates queries and keys, writes keys and values to their slots (-1 writes nothing).

    qkv: [T, (num_heads + 2 num_kv_heads) * head_dim]. ropes: [positions, R] float32 each. With
    q_norm and k_norm each head is RMS-normalised first. Returns q [T, num_heads * head_dim] and the
    layer's cache tensors (attention.kv_format says which), modified in place.
    """
    block, norm = attention.block, attention.block.qk_norm
    if block.norms_over_ranks:
        qkv = composed.normed_over_ranks(_OPS, qkv, attention)
        attention = replace(attention, q_norm=None, k_norm=None)
    rotary, places = block.positions.kind == "rotary", block.positions
    q, *written = _run()(
        *("regatta_rope_and_cache_write", qkv, inputs.positions, inputs.slot_mapping),
        ropes[places.table] if rotary else None,
        ropes[places.query_table] if rotary and places.query_table >= 0 else None,
        *(_weight(attention.q_norm), _weight(attention.k_norm), list(cache)),
        inputs.block_positions if places.two_dimensional else None,
        *(block.num_heads, block.num_kv_heads, block.head_dim, _epsilon(norm)),
        norm is not None and norm.plus_one,
        *(block.qk_norm_whole, block.qk_norm_last, places.interleaved, attention.kv_format),
    )
    return q, written


def _weight(weights: NormWeights | None) -> Tensor | None:
    return None if weights is None else weights.weight


def _epsilon(norm: Norm | None) -> float:
    return 0.0 if norm is None else norm.epsilon


def paged_attention(
    q: Tensor,
    attention: Attention,
    cache: LayerCache,
    inputs: StepInputs,
    tree_mask: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged spans over a paged cache.

    Token i of span b (n tokens) sits at position context_lens[b] - n + i and sees positions up to
    its own, at most `window` of them. q, result: [T, num_heads * head_dim].
    tree_mask: [T, words] int32; bit j of a token's row (the lowest of word 0 first) says whether it
    sees token j of its own span, instead of all up to itself; its last bit is its own. Spans of
    more than 32 * words tokens are no trees. A tree's windows count from a token's depth.
    With block.prefix_mask every token sees the first inputs.prefix_lens of its request as well;
    a span that begins before them has them all. attention.sinks: a term exp(sink) of the softmax's
    sum for each head, which no value goes with.
    """
    block = attention.block
    return _run()(
        *("regatta_paged_attention", q, list(cache), inputs.cu_seqlens_q, inputs.context_lens),
        *(inputs.block_tables, inputs.max_lens, tree_mask, attention.slopes),
        inputs.prefix_lens if block.prefix_mask else None,
        *(attention.sinks, block.num_heads, block.softmax_scale, block.window, block.softcap),
        attention.kv_format,
    )[0]


def copy_blocks(caches: Sequence[Tensor], copies: Sequence[tuple[int, int]]) -> None:
    """Copies blocks of caches [N, ...], in place: (from, to), no block both.

    The caches are of one device, and their blocks multiples of 16 bytes.
    """
    import paddle

    pairs = paddle.to_tensor(np.array(copies, np.int32), place=paddle.CPUPlace())
    _run()("regatta_copy_blocks", list(caches), pairs)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """The activation of x [T, I], or of x [T, 2 I] with a gate. Returns [T, I]."""
    function, of = FUNCTIONS.index(activation.function), activation
    return _run()("regatta_activate", x, function, of.gated, of.clamp, of.slope, of.up_offset)[0]


def block(
    hidden: Tensor, weights: BlockWeights, step: BlockStep = BlockStep()
) -> tuple[Tensor, list[Tensor]]:
    """The block's output for hidden [T, H], and its cache's tensors, modified in place.

    [T, H]; with step.rows [L, H], at least one row, and step.inputs.max_lens has their kind.
    """
    import paddle

    # In a call of its own a block has none ahead. Programs have the smaller operators.
    record = weights.block
    in_parts = record.has_parts and not paddle.in_dynamic_mode()
    if record.reads_before or not _is_fused(record) or in_parts:
        return weights.run(_OPS, hidden, step)
    run = _Run.of([(weights,)], [step.cache], step.ropes)
    return run(hidden, step.inputs, step.tree_mask, step.rows)


@dataclass(frozen=True)
class _Run:
    """Layers that share a call of regatta_blocks. See predict.ops.composed.JoinedLayers."""

    blocks: str  # the records that the layers have
    order: list[int]  # which of them each block has
    weights: list[Tensor]
    caches: list[Tensor]

    @classmethod
    def of(
        cls, layers: Sequence[Layer], caches: Sequence[LayerCache], ropes: Sequence[Tensor]
    ) -> _Run:
        blocks = [block for layer in layers for block in layer]
        texts = [records.record(block) for block in blocks]
        kinds = list(dict.fromkeys(texts))
        return cls(
            "|".join(kinds),
            [kinds.index(text) for text in texts],
            [tensor for block in blocks for tensor in records.tensors(block, ropes)],
            [tensor for cache in caches for tensor in cache],
        )

    def bound(self) -> _Run:
        """The run with lists of the tensors' addresses, valid as long as the tensors are."""
        call = _run()
        return replace(
            self,
            weights=call("regatta_views", self.weights),
            caches=call("regatta_views", self.caches) if self.caches else [],
        )

    def __call__(
        self,
        hidden: Tensor,
        inputs: StepInputs | None,
        tree_mask: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        caches = self.caches or _no_tensors(hidden)
        step = _no_tensors(hidden) if inputs is None else inputs.of_blocks
        made, *written = _run()(
            *("regatta_blocks", hidden, self.weights, caches, step, tree_mask, rows),
            *(self.blocks, self.order),
        )
        return made, written if self.caches else []


def _no_tensors(anything: Tensor) -> list[Tensor]:
    """The list of tensors to give to regatta_blocks where it reads none."""
    import paddle

    # A traced program has no empty lists.
    return [] if paddle.in_dynamic_mode() else [anything]


def _is_fused(block: Block) -> bool:
    """Whether regatta_blocks computes it. Programs have prefix masks in smaller operators."""
    import paddle

    has_mask = getattr(block, "prefix_mask", False)
    return block.is_fused and (not has_mask or paddle.in_dynamic_mode())


def _runs(
    ops: ModuleType, pairs: Iterable[tuple[Layer, LayerCache]], ropes: Sequence[Tensor]
) -> Iterator[_Run | composed.LayerRun]:
    for fused, alike in groupby(
        pairs, lambda pair: all(_is_fused(weights.block) for weights in pair[0])
    ):
        some = list(alike)
        if fused:
            yield _Run.of([layer for layer, _ in some], [cache for _, cache in some], ropes)
        else:
            yield from composed.layer_runs(ops, some, ropes)


def layers(
    hidden: Tensor,
    layers: Sequence[Layer],
    caches: Sequence[LayerCache],
    ropes: Sequence[Tensor],
    inputs: StepInputs,
    tree_mask: Tensor | None = None,
    rows: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The layers' blocks, in order.

    Returns hidden [T, H] and the tensors of the layers' caches, modified in place. rows: [L] int32,
    those that are returned, [L, H]; only the first layer may have a cache then.
    """
    runs = _runs(_OPS, zip(layers, caches, strict=True), ropes)
    return composed.in_turn(_OPS, runs, hidden, inputs, tree_mask, rows)


def kept_layers() -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """`layers` for the same ones again and again: see _KeptLayers."""
    return _KeptLayers()


class _KeptLayers:
    """`layers` whose weights are gathered once; their caches and rotary table are each call's.

    Of layers that stay where they are, and are called in the same parts. ropes: one table.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[int, ...], tuple[_Run, list[int], Sequence[Layer]]] = {}

    def __call__(
        self,
        hidden: Tensor,
        layers: Sequence[Layer],
        caches: Sequence[LayerCache],
        ropes: Sequence[Tensor],
        inputs: StepInputs,
    ) -> tuple[Tensor, list[Tensor]]:
        """See layers."""
        key, (rope,) = tuple(map(id, layers)), ropes
        if key not in self._runs:
            if not all(_is_fused(weights.block) for layer in layers for weights in layer):
                return _OPS.layers(hidden, layers, caches, ropes, inputs)
            made = _Run.of(layers, caches, ropes)
            places = [place for place, each in enumerate(made.weights) if each is rope]
            self._runs[key] = (
                replace(made, caches=[]),
                places,
                layers,
            )  # which stay, as their ids do
        run, places, _ = self._runs[key]
        for place in places:
            run.weights[place] = rope
        return replace(run, caches=[each for cache in caches for each in cache])(hidden, inputs)


class BoundLayers(composed.BoundLayers):
    """`layers` for tensors that stay the same, which are gathered once.

    The operator reads their addresses from one list in place of some hundred arguments. This saves
    a fourteenth of a small model's step on the CPU, and half a millisecond of a prompt on a GPU.
    """

    ops = _OPS
    runs = staticmethod(_runs)


def before_head(hidden: Tensor, head: Head) -> Tensor:
    """The input [T, H] of the head's matrix, from hidden [T, H]."""
    return composed.before_head(_OPS, hidden, head)


def logits(hidden: Tensor, head: Head, logit_indices: Tensor | None = None) -> Tensor:
    """float32 logits [L, V] of the rows `logit_indices` (or all) of hidden [T, H]."""
    spec, matrix = head.spec, head.linear
    weight, epsilon = _weight(head.norm), _epsilon(spec.norm)
    if head.projection is not None or not is_plain_rms(spec.norm):
        rows = hidden if logit_indices is None else take(hidden, logit_indices)
        hidden = composed.before_head(_OPS, rows, head)
        weight, epsilon, logit_indices = None, 0.0, None
    made = _run()(
        *("regatta_logits", hidden, weight, matrix.tensors, matrix.bias, logit_indices),
        *(matrix.scheme, matrix.out_features, epsilon, spec.scale, spec.softcap),
    )[0]
    return composed.of_all_tokens(_OPS, made, head.share)


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
    inputs: StepInputs, choices: Tensor, plan: Tensor, tokens: Tensor, block_size: int
) -> None:
    """Moves a draft model's step to the end of the target's verified drafts, in place; GPUs only.

    inputs: as if all drafts were accepted. choices: CHOICES of predict.ops.columns, per request.
    plan [B, W] int32, per request: the number of drafts (-1: nothing moves), the row of the first
    choice, the number of its tokens that are choices (0 or 2), the places of its drafts. Rows and
    places are indices of `tokens` [R] int32, the target's.
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
    first_token: int = 0,
) -> None:
    """Biases, penalties and bans on logits [L, V], in place; GPUs only.

    penalties: PENALTIES of predict.ops.columns, at least L columns; `slot` is a row of `history`
    [S, M] int32, which holds the sequence's tokens, and of `rules` [S, W] int32. New tokens are
    those up to token_ids[logit_indices]; the newest is put
    into the history. rules: see csrc/include/regatta/adjust_logits.h. first_token: of the first
    column.
    """
    given = logits, penalties, token_ids, logit_indices, history, rules
    _run()("regatta_adjust_logits", *given, first_token)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """How likely each row of logits [L, V] makes its token, and the likeliest ones; GPUs only.

    token_ids [R] int32, R at least L. Returns [L, 2 + 2 num_top] int32, floats by their bits: the
    token's logprob, 1 + the number of likelier tokens, the num_top (at most 32) likeliest tokens,
    -1 behind the last one, and their logprobs. Any values for a row with a NaN.
    """
    return _run()("regatta_logprobs", logits, token_ids, num_top)[0]


def sample_step(logits: Tensor, choices: Tensor, last_tokens: Tensor) -> None:
    """`sample` into the first L entries of last_tokens [R] int32, in place; GPUs only.

    choices: CHOICES of predict.ops.columns, an even number of columns, at least L. A row of logits
    that cannot be drawn from yields -1.
    """
    _run()("regatta_sample_step", logits, choices, last_tokens)


def largest_step(logits: Tensor, last_tokens: Tensor, share: Share) -> None:
    """The token of each row's largest logit into the first L of last_tokens [R] int32; GPUs only.

    logits [L, N] float32: a rank's own tokens' in its first columns. The lowest of equals; -1 for a
    row in which a rank has a NaN.
    """
    begin, end = share.tokens()
    _run()("regatta_largest_step", logits, last_tokens, begin, end - begin)


def verify_window(
    logits: Tensor,
    choices: Tensor,
    token_ids: Tensor,
    logit_indices: Tensor,
    last_tokens: Tensor,
    window: int,
    max_candidate_len: int,
) -> None:
    """Replaces tokens that `sample_step` drew by accepted drafts, in place; GPUs only.

    predict.engine.window has the rule. choices: CHOICES of predict.ops.columns; num_drafts is 0
    where the drawn token stays. Row r's draft is token_ids[logit_indices[r] + 1].
    """
    _run()(
        *("regatta_verify_window", logits, choices, token_ids, logit_indices, last_tokens),
        *(window, max_candidate_len),
    )


def round_weight(
    weight: Tensor, rule: str, group_size: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes [N, K], scale, and zero or None of weight [N, K], where it lies; GPUs only.

    As predict.schemes._rounding has them by the rule, bit for bit. group_size: columns that share a
    scale, -1 all.
    """
    codes, scale, zero = _run()("regatta_round_weight", weight, rule, group_size)
    return codes, scale, zero if rule == "int4" else None


def transposed(weight: Tensor) -> Tensor:
    """Weight [K, N] as [N, K], where it lies; GPUs only."""
    dtype = str(weight.dtype).removeprefix("paddle.")
    return _run()("regatta_pack_dense", weight, False, dtype)[0]
