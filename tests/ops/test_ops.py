"""The compiled operators and their plain-Paddle twins: same functions, same results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from predict.device import library
from predict.nn.blocks import BlockStep, BlockWeights, Linear
from predict.nn.decoder import map_tensors
from predict.nn.inputs import HostTensors, StepInputs, empty_example, max_lens_of, to_tensors
from predict.nn.kinds.attention import Attention
from predict.nn.kinds.mlp import Mlp
from predict.nn.rope import rope_table
from predict.nn.spec import RopeSpec
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.block_forms import FORMS, blocks_of, layer_of
from tests.support.records import attention_of, head_of, mlp_of
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

paddle = library.import_paddle()

OPERATOR = "attention_block"  # whose candidates the fixture `candidate` goes through
DTYPES = ["float32", "bfloat16", "float16"]
HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 72, 88, 6, 2, 32, 16

EMPTY = Linear("dense", (), None, 88, 72)
Spans = Sequence[tuple[int, int, Sequence[int]]]


class Case:
    """Random weights of one attention and one MLP block, for both backends."""

    def __init__(self, dtype: str, bias: bool, qk_norm: bool) -> None:
        self.dtype = dtype
        self.generator = np.random.default_rng(5)
        qkv_size = (HEADS + 2 * KV_HEADS) * DIM
        qk_norms = self.tensor(DIM, around=1.0), self.tensor(DIM, around=1.0)
        self.attention = attention_of(
            self.linear(HIDDEN, qkv_size, bias),
            self.linear(HEADS * DIM, HIDDEN, bias),
            self.tensor(HIDDEN, around=1.0),
            (HEADS, KV_HEADS, DIM),
            qk_norms if qk_norm else None,
        )
        gate_up, down = self.linear(HIDDEN, 2 * INNER, bias), self.linear(INNER, HIDDEN, bias)
        self.mlp = mlp_of(gate_up, down, self.tensor(HIDDEN, around=1.0))

    def tensor(self, *shape: int, around: float = 0.0) -> Any:
        values = around + 0.1 * self.generator.standard_normal(shape)
        return paddle.to_tensor(values.astype(np.float32)).astype(self.dtype)

    def linear(self, num_in: int, num_out: int, bias: bool) -> Linear:
        weight = self.tensor(num_out, num_in)
        return Linear("dense", (weight,), self.tensor(num_out) if bias else None, num_in, num_out)

    def packed(self, linear: Linear) -> Linear:
        return dataclasses.replace(linear, tensors=(ops.pack_dense(linear.tensors[0], self.dtype),))

    def packed_attention(self) -> Attention:
        a = self.attention
        return dataclasses.replace(a, qkv=self.packed(a.qkv), out=self.packed(a.out))

    def packed_mlp(self) -> Mlp:
        m = self.mlp
        return dataclasses.replace(m, gate_up=self.packed(m.gate_up), down=self.packed(m.down))


# Cached tokens, tokens of the step, blocks: a prompt's chunk, a decode step, a fresh prompt.
MIXED = [(20, 5, [4, 9]), (33, 1, [0, 2, 7]), (0, 19, [5, 6])]


def mixed_step() -> StepInputs:
    return step_of(MIXED)


def step_of(spans: Spans) -> StepInputs:
    return to_tensors(arrays_of(spans), paddle.CPUPlace())


def arrays_of(spans: Spans) -> StepInputs:
    lengths = np.array([n for _, n, _ in spans])
    positions = np.concatenate([np.arange(start, start + n) for start, n, _ in spans])
    slots = np.concatenate(
        [
            np.array(blocks)[np.arange(start, start + n) // BLOCK] * BLOCK
            + np.arange(start, start + n) % BLOCK
            for start, n, blocks in spans
        ]
    )
    tables = np.full((len(spans), max(len(blocks) for *_, blocks in spans)), -1)
    for row, (_, _, blocks) in enumerate(spans):
        tables[row, : len(blocks)] = blocks
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)])
    context_lens = np.array([start + n for start, n, _ in spans])
    return StepInputs(
        token_ids=np.zeros(len(positions)),
        positions=positions,
        slot_mapping=slots,
        cu_seqlens_q=cu_seqlens,
        context_lens=context_lens,
        block_tables=tables,
        logit_indices=cu_seqlens[1:] - 1,
        max_lens=max_lens_of(list(lengths), context_lens.tolist()),
    )


def close(got: Any, wanted: Any, dtype: str) -> None:
    left, right = got.astype("float32").numpy(), wanted.astype("float32").numpy()
    np.testing.assert_array_equal(np.isnan(left), np.isnan(right))
    assert_close(np.nan_to_num(left), np.nan_to_num(right), dtype, BLOCK_ROUNDINGS)


def same(got: Any, wanted: Any) -> None:
    left, right = got.astype("float32").numpy(), wanted.astype("float32").numpy()
    np.testing.assert_array_equal(left, right)


def caches(case: Case, spans: Spans = MIXED) -> tuple[Any, Any]:
    """Cached keys and values in the slots that the step sees, NaN everywhere else."""
    generator = np.random.default_rng(9)
    shape = (max(max(blocks) for *_, blocks in spans) + 1, KV_HEADS, BLOCK, DIM)
    pools = []
    for _ in range(2):
        pool = np.full(shape, np.nan, np.float32)
        for length, _, blocks in spans:
            for position in range(length):
                at = (blocks[position // BLOCK], slice(None), position % BLOCK)
                pool[at] = generator.standard_normal((KV_HEADS, DIM))
        pools.append(paddle.to_tensor(pool).astype(case.dtype))
    return pools[0], pools[1]


def mixed_trees() -> Any:
    """A tree mask [T, 1] for each span of MIXED: token i's parent is token i / 2."""
    masks: list[int] = []
    for length in np.diff(arrays_of(MIXED).cu_seqlens_q):
        seen: list[int] = []
        for token in range(length):
            seen.append(1 << token | (seen[token // 2] if token else 0))
        masks += seen
    return paddle.to_tensor(np.array(masks, np.int32).reshape(-1, 1))


# Of the six heads: far below all scores, as high as them, far above, and all of these at once.
SINKS = ((-1e4,) * 6, (0.0, 0.5, 1.0, 2.0, 3.0, 5.0), (1e4,) * 6, (-1e4, -2.0, 0.0, 3.0, 30.0, 1e4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [-1, 7])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("sinks", SINKS, ids=str)
def test_attention_with_sinks_equals_its_plain_twin(
    compiled: library.Library, dtype: str, window: int, is_tree: bool, sinks: tuple[float, ...]
) -> None:
    case, inputs = Case(dtype, True, True), mixed_step()
    tree_mask = mixed_trees() if is_tree else None
    tokens = int(inputs.positions.shape[0])
    hidden, q = case.tensor(tokens, HIDDEN), 10 * case.tensor(tokens, HEADS * DIM)
    ropes = [paddle.to_tensor(rope_table(RopeSpec(), DIM, 64, 64))]
    results = []
    for backend, attention in ((ops, case.packed_attention()), (reference, case.attention)):
        block = dataclasses.replace(attention.block, sinks=True, window=window, softcap=4.0)
        given = paddle.to_tensor(np.array(sinks, np.float32))
        attention = dataclasses.replace(attention, block=block, sinks=given)
        like = dtype if backend is ops else "float32"
        step = BlockStep(caches(case), ropes, inputs, tree_mask)
        out, written = backend.block(hidden.astype(like), attention, step)
        mixed = backend.paged_attention(q.astype(like), attention, written, inputs, tree_mask)
        results.append((out, mixed))
    (out, mixed), (wanted, wanted_mixed) = results
    close(out, wanted, dtype)
    close(mixed, wanted_mixed, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bias", "qk_norm"), [(False, False), (True, True)])
def test_one_call_for_all_layers_equals_the_block_ops(
    compiled: library.Library, dtype: str, bias: bool, qk_norm: bool
) -> None:
    case = Case(dtype, bias, qk_norm)
    inputs = mixed_step()
    hidden = case.tensor(int(inputs.positions.shape[0]), HIDDEN)
    ropes = [paddle.to_tensor(rope_table(RopeSpec(), DIM, 64, 64))]
    whole = case.packed_attention()
    windowed = dataclasses.replace(whole, block=dataclasses.replace(whole.block, window=7))
    layers = [(whole, case.packed_mlp()), (windowed, case.packed_mlp())]
    hidden_out, written = ops.layers(hidden, layers, [caches(case), caches(case)], ropes, inputs)

    wanted, expected = hidden, []
    for attention, mlp in layers:
        wanted, pair = ops.block(wanted, attention, BlockStep(caches(case), ropes, inputs))
        wanted = ops.block(wanted, mlp)[0]
        expected += pair
    for got, want in zip([hidden_out, *written], [wanted, *expected], strict=True):
        same(got, want)

    kept = [caches(case), caches(case)]
    bound = ops.BoundLayers(layers, kept, ropes)
    for _ in range(2):  # what it wrote before is written again
        same(bound(hidden, inputs), hidden_out)
    for tensor, want in zip([*kept[0], *kept[1]], written, strict=True):
        same(tensor, want)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(
    ("dtype", "inner"), [("float32", 88), ("float32", 96), ("bfloat16", 88), ("float16", 96)]
)
def test_layers_of_every_form_equal_their_plain_twins(
    compiled: library.Library, candidate: str, dtype: str, form: str, inner: int
) -> None:
    case, inputs = Case(dtype, False, False), mixed_step()

    def linear(num_in: int, num_out: int, bias: bool) -> Linear:
        made = case.linear(num_in, num_out, bias)
        return dataclasses.replace(made, tensors=(made.tensors[0] * 0.7,))

    plain = [
        layer_of(
            blocks_of(form, (HEADS, KV_HEADS, DIM), inner),
            HIDDEN,
            linear,
            lambda size, around: case.tensor(size, around=around),
            paddle.to_tensor,
        )
        for _ in range(2)
    ]

    def packed_block(block: Any) -> BlockWeights:
        changes = {name: case.packed(linear) for name, linear in block.linears().items()}
        return dataclasses.replace(block, **changes)

    packed = [tuple(map(packed_block, layer)) for layer in plain]
    wide = map_tensors(plain, lambda _, tensor: tensor.astype("float32"))
    hidden = case.tensor(int(inputs.positions.shape[0]), HIDDEN)
    ropes = [paddle.to_tensor(rope_table(RopeSpec(), DIM, 64, 64))]

    def pairs(like: str) -> list[Any]:
        return [tuple(tensor.astype(like) for tensor in caches(case)) for _ in plain]

    got, written = ops.layers(hidden, packed, pairs(dtype), ropes, inputs)
    wanted, expected = reference.layers(
        hidden.astype("float32"), wide, pairs("float32"), ropes, inputs
    )
    for mine, theirs in zip([got, *written], [wanted, *expected], strict=True):
        close(mine, theirs, dtype)
    lasts, _ = ops.layers(
        hidden, packed[:1], pairs(dtype)[:1], ropes, inputs, rows=inputs.logit_indices
    )
    whole, _ = ops.layers(hidden, packed[:1], pairs(dtype)[:1], ropes, inputs)
    same(lasts, whole.astype("float32")[inputs.logit_indices])


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_a_long_prompt_equal_those_of_its_parts(
    compiled: library.Library, dtype: str
) -> None:
    case, blocks = Case(dtype, False, False), range(10, 117)
    attention, mlp = case.packed_attention(), case.packed_mlp()
    ropes = [paddle.to_tensor(rope_table(RopeSpec(), DIM, 2048, 2048))]
    spans = [MIXED[0], (0, 1700, blocks), MIXED[1]]
    hidden = case.tensor(1706, HIDDEN)
    cache, of_parts = caches(case, spans), caches(case, spans)
    whole, _ = ops.block(hidden, attention, BlockStep(cache, ropes, step_of(spans)))
    found = [
        ops.block(
            rows, attention, BlockStep(of_parts, ropes, step_of([(begin, len(rows), blocks)]))
        )
        for begin in range(0, 1700, 250)
        if len(rows := hidden[5 + begin : min(255 + begin, 1705)])
    ]
    same(paddle.concat([out for out, _ in found]), whole[5:1705])
    for one, other in zip(cache, of_parts, strict=True):
        same(other[10:], one[10:])
    parts = [ops.block(hidden[begin : begin + 100], mlp)[0] for begin in range(0, 1700, 100)]
    same(paddle.concat(parts), ops.block(hidden[:1700], mlp)[0])


def test_trees_of_drafts_are_cut_like_prompts(compiled: library.Library) -> None:
    # A block takes 768 tokens at a time: the tree's first three and its last four.
    case, tree = Case("float32", False, False), (60, 7, range(48, 53))
    attention = case.packed_attention()
    attention = dataclasses.replace(
        attention, block=dataclasses.replace(attention.block, window=50)
    )
    ropes = [paddle.to_tensor(rope_table(RopeSpec(), DIM, 2048, 2048))]
    spans = [(0, 765, range(48)), tree]
    hidden = case.tensor(772, HIDDEN)
    # Bits of ancestors: 0 - (1 - (3, 4), 2 - (5 - 6))
    bits = np.array([0] * 765 + [1, 3, 5, 11, 19, 37, 101], np.int32)
    mask = paddle.to_tensor(bits.reshape(-1, 1))

    def outcome(first: int, spans: Spans, mask: Any) -> Any:
        cache = caches(case, [(0, 0, range(48)), tree])
        step = step_of(spans)
        return ops.block(hidden[first:], attention, BlockStep(cache, ropes, step, mask))[0]

    alone = outcome(765, [tree], mask[765:])
    same(outcome(0, spans, mask)[765:], alone)
    assert not np.array_equal(outcome(765, [tree], None).numpy(), alone.numpy())


def test_wrong_number_of_weights_is_refused(compiled: library.Library) -> None:
    case = Case("float32", False, False)
    attention, mlp = case.packed_attention(), case.packed_mlp()
    layer, short = (attention, mlp), (attention, dataclasses.replace(mlp, down=EMPTY))
    ropes = [paddle.to_tensor(rope_table(RopeSpec(), DIM, 64, 64))]
    with pytest.raises(ValueError, match="weights holds 6 tensors, and down is missing"):
        ops.layers(case.tensor(25, HIDDEN), [short], [caches(case)], ropes, mixed_step())
    with pytest.raises(ValueError, match="weights holds 6 tensors, and down is missing"):
        ops.BoundLayers([short], [caches(case)], ropes)(case.tensor(25, HIDDEN), mixed_step())
    with pytest.raises(ValueError, match="caches holds 2 tensors more than the blocks need"):
        ops.BoundLayers([layer], [(*caches(case), *caches(case))], ropes)(
            case.tensor(25, HIDDEN), mixed_step()
        )


def test_host_tensors_take_the_values_and_shapes_of_each_step() -> None:
    tensors = HostTensors()
    for step in (arrays_of(MIXED), empty_example(3), arrays_of(MIXED)):
        filled, wanted = tensors.filled(step), to_tensors(step, paddle.CPUPlace())
        for got, want in zip(filled.given, wanted.given, strict=True):
            assert got.dtype == want.dtype
            np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_sampling_twins_choose_the_same_tokens(compiled: library.Library) -> None:
    generator = np.random.default_rng(3)
    rows = 400
    logits = paddle.to_tensor(generator.standard_normal((rows, 97)).astype(np.float32) * 3)
    columns = [
        paddle.to_tensor(values)
        for values in (
            generator.choice([0.0, 0.5, 1.0, 2.0], rows).astype(np.float32),
            generator.choice([0, 1, 5, 50, 200], rows).astype(np.int32),
            generator.choice([0.1, 0.7, 0.95, 1.0], rows).astype(np.float32),
            generator.integers(0, 1 << 62, rows),
            generator.integers(0, 1 << 20, rows),
        )
    ]
    got = ops.sample(logits, *columns).numpy()
    wanted = reference.sample(logits, *columns).numpy()
    # A draw on the border of two tokens may fall either way with another order of summation.
    assert (got != wanted).sum() <= 1


@pytest.mark.parametrize("packed", [True, False])
def test_embedding_rows_are_the_weights_rows(compiled: library.Library, packed: bool) -> None:
    case = Case("float32", False, False)
    head = case.linear(HIDDEN, 50, False)
    ids = paddle.to_tensor(np.array([0, 49, 7, 7], np.int32))
    weight = None if packed else head.tensors[0]
    got = ops.embedding(ids, weight, case.packed(head))
    np.testing.assert_array_equal(got.numpy(), reference.embedding(ids, weight, head).numpy())


def test_logits_equal_their_plain_twin(compiled: library.Library) -> None:
    case = Case("bfloat16", False, False)
    head = case.linear(HIDDEN, 131, False)
    hidden, norm = case.tensor(9, HIDDEN), case.tensor(HIDDEN, around=1.0)
    rows = paddle.to_tensor(np.array([8, 0, 3], np.int32))
    got = ops.logits(hidden, head_of(case.packed(head), norm), rows)
    assert got.dtype == paddle.float32
    close(got, reference.logits(hidden.astype("float32"), head_of(head, norm), rows), "bfloat16")
