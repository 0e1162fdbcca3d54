"""KV formats: what is written, what attention reads, and that the compiled operators agree."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.device.library import Library
from predict.errors import UserError
from predict.loading.cache_scales import head_scales
from predict.nn.cache_formats import (
    FORMATS,
    KV_FORMATS,
    LATENT_FORMATS,
    CacheTensor,
    KvFormat,
    key_value_rows,
    kv_format_of,
)
from predict.nn.kinds.attention import AttentionBlock
from tests.support.attention import Problem, Shape, attention, rope_table, rotated
from tests.support.cpu_kernels import (
    CANDIDATES,
    DTYPES,
    PAIRED,
    Array,
    force,
    int32,
    normal,
    numpy32,
    refusal,
    rounded,
    tensor,
    threads,
)
from tests.support.latents import block_of
from tests.support.records import attention_of, llama_spec
from tests.support.tolerances import assert_close

OPERATOR = "paged_attention"  # whose candidates the fixture `candidate` goes through

QUANTIZED = [row for row in FORMATS if row.scale_floats]
SPEC = llama_spec(2, 6, 2, 32, 96, vocab_size=100, hidden_size=64, max_position=64)


def given_scales(kv_format: KvFormat, num_kv_heads: int) -> Any:
    """Scales per head that clip a few normal values; None where rows have their own."""
    if kv_format.scales != "head":
        return None
    assert kv_format.range_max is not None
    return tensor(np.linspace(2.0, 3.0, num_kv_heads) / kv_format.range_max, "float32")


class Quantized:
    """A pool [blocks, Hkv, block_size, D] in a format, and what it stands for."""

    def __init__(self, kv_format: KvFormat, pool: Array) -> None:
        import paddle

        written = ~np.isnan(pool[..., 0])
        rows = tensor(np.nan_to_num(pool), "float32")
        given = given_scales(kv_format, pool.shape[1])
        scale = None if given is None else given.unsqueeze(-1)
        codes, made = kv_format.quantize(rows, scale)
        assert made is not None
        self.values = numpy32(kv_format.unpack(codes, made, pool.shape[-1]))
        # What nobody wrote: any code, and scales that would spread.
        noise = np.random.default_rng(3).integers(0, 256, codes.shape).astype(np.uint8)
        self.codes = paddle.to_tensor(np.where(written[..., None], codes.numpy(), noise))
        self.scale = given
        if given is None:
            mask = written.reshape(written.shape + (1,) * (made.ndim - written.ndim))
            self.scale = paddle.to_tensor(np.where(mask, made.numpy(), np.nan).astype(np.float32))


class QuantizedProblem:
    def __init__(self, kv_format: KvFormat, problem: Problem) -> None:
        self.kv_format, self.problem = kv_format, problem
        batch = problem.batch
        self.keys = Quantized(kv_format, batch.filled_cache(problem.keys))
        self.values = Quantized(kv_format, batch.filled_cache(problem.values))

    def run(self, library: Library, tree_mask: Any = None) -> Array:
        p, shape = self.problem, self.problem.batch.shape
        return numpy32(
            library.op("regatta_paged_attention")(
                tensor(p.q.reshape(shape.num_tokens, -1), p.dtype),
                [self.keys.codes, self.values.codes, self.keys.scale, self.values.scale],
                *p.batch.index_tensors(),
                tree_mask,
                *(None, None),
                tensor(np.array(shape.sinks, "f4"), "float32") if shape.sinks else None,
                shape.num_heads,
                p.scale,
                shape.window,
                0.0,
                self.kv_format.name,
            )[0]
        )

    def expected(self) -> Any:
        p = self.problem
        keys = p.batch.context_rows(self.keys.values)
        values = p.batch.context_rows(self.values.values)
        return attention(p.batch.shape, p.q, keys, values, p.scale)


# As test_cpu_kernels_attention's: groups, head dims that fill vectors or do not, odd ones, blocks,
# windows, splits.
SHAPES = (
    Shape(14, 2, 64, 64, ((1, 1), (1, 63), (1, 65), (1, 300), (33, 40))),
    Shape(8, 1, 128, 16, ((5, 15), (0, 40), (17, 17), (1, 16), (3, 130))),
    Shape(6, 3, 80, 32, ((129, 129), (1, 513), (0, 0))),
    Shape(6, 2, 96, 24, ((30, 600), (1, 25)), window=100),
    Shape(4, 2, 40, 8, ((9, 9), (1, 8), (70, 70)), window=5),
    Shape(2, 1, 256, 64, ((3, 200), (1, 1))),
    Shape(4, 2, 7, 16, ((3, 20), (1, 70))),
    Shape(4, 2, 20, 16, ((3, 20), (1, 70))),
    Shape(4, 2, 64, 16, ((40, 60), (1, 700), (1, 1)), sinks=(-1e4, 1.0, 5.0, 1e4)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kv_format", QUANTIZED, ids=lambda row: row.name)
def test_attention_reads_what_the_codes_stand_for(
    compiled: Library, candidate: str, kv_format: KvFormat, shape: Shape, dtype: str
) -> None:
    if candidate in PAIRED and dtype == "bfloat16" and shape.head_dim % 2:
        pytest.skip("refused")
    problem = QuantizedProblem(kv_format, Problem.of(shape, dtype))
    assert_close(problem.run(compiled), problem.expected(), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_format", QUANTIZED, ids=lambda row: row.name)
def test_cut_and_number_of_threads_do_not_change_a_bit(
    compiled: Library, kv_format: KvFormat, dtype: str
) -> None:
    shape = Shape(8, 2, 64, 32, ((1, 40), (3, 3), (1, 1100), (60, 200), (1, 513)))
    problem = Problem.of(shape, dtype)
    together = QuantizedProblem(kv_format, problem).run(compiled)
    alone = []
    for i, (count, _) in enumerate(shape.spans):
        cuts = (0, 17, count) if count > 17 else (0, count)
        for begin, end in pairwise(cuts):
            alone.append(QuantizedProblem(kv_format, problem.part(i, begin, end)).run(compiled))
    np.testing.assert_array_equal(np.concatenate(alone), together)
    for count in (1, 3):
        with threads(compiled, count):
            again = QuantizedProblem(kv_format, problem).run(compiled)
            np.testing.assert_array_equal(again, together)


# heads, kv heads, head_dim, rotary dims
ROPES = ((14, 2, 64, 64), (3, 1, 80, 32), (4, 2, 7, 6), (2, 2, 40, 40), (1, 1, 129, 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", ROPES)
@pytest.mark.parametrize("kv_format", QUANTIZED, ids=lambda row: row.name)
def test_rows_are_quantized_when_they_are_written(
    compiled: Library,
    candidate: str,
    kv_format: KvFormat,
    sizes: tuple[int, int, int, int],
    dtype: str,
) -> None:
    import paddle

    heads, kv_heads, dim, rotary = sizes
    rng = np.random.default_rng(3)
    positions, slots = np.array([0, 5, 6, 49, 7], np.int32), np.array([3, 16, -1, 39, 0], np.int32)
    qkv = normal(rng, 5, heads + 2 * kv_heads, dim)
    qkv[0, -1] = 0.0  # a row of zeros
    qkv[1, -1] = 1.5  # and one without extent
    qkv = rounded(qkv, dtype)
    table = rope_table(50, rotary)
    tensors = kv_format.tensors(key_value_rows(kv_heads, dim), 5, 8, dtype)
    caches = [paddle.full(list(t.shape), 77, t.dtype) for t in tensors]
    if kv_format.scales == "head":
        caches[2:] = [given_scales(kv_format, kv_heads)] * 2
    before = [cache.numpy() for cache in caches]
    outputs = compiled.op("regatta_rope_and_cache_write")(
        tensor(qkv.reshape(5, -1), dtype),
        int32(positions),
        int32(slots),
        tensor(table, "float32"),
        *(None, None, None),
        caches,
        None,
        *(heads, kv_heads, dim, 1e-6, False, False, False, False),
        kv_format.name,
    )
    q, k, v = np.split(qkv.astype(np.float64), [heads, heads + kv_heads], axis=1)
    assert_close(numpy32(outputs[0]), rotated(q, table[positions]).reshape(5, -1), dtype)
    written = slots >= 0
    for which, new in enumerate((rotated(k, table[positions]), v)):
        rows = new[written].astype(np.float32)
        given = None if kv_format.scales == "token" else caches[2 + which]
        wanted, scale = kv_format.quantize(tensor(rows, "float32"), given)
        assert scale is not None
        at = slots[written] // 8, slice(None), slots[written] % 8
        got = caches[which].numpy()[at]
        # A product that ends up beside the middle of two codes may fall to either.
        unit = scale if kv_format.scales == "token" else caches[2 + which]
        unpacked = [
            kv_format.unpack(paddle.to_tensor(c), unit, dim).numpy() for c in (got, wanted.numpy())
        ]
        largest = np.abs(unpacked[1]).max(axis=-1, keepdims=True)
        step = largest / (8 if kv_format.name == "fp8" else 7 if kv_format.name == "int4" else 60)
        assert (np.abs(unpacked[0] - unpacked[1]) <= step).all()
        assert (got != wanted.numpy()).mean() < 0.01
        if kv_format.scales == "token":
            np.testing.assert_allclose(
                caches[2 + which].numpy()[at], scale.numpy(), rtol=1e-5, atol=1e-6
            )
        untouched = np.ones((5, 8), bool)
        untouched[slots[written] // 8, slots[written] % 8] = False
        for cache, old in list(zip(caches, before, strict=True))[which::2]:
            if cache.ndim > 1:
                left, right = (a.swapaxes(1, 2)[untouched] for a in (cache.numpy(), old))
                np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("kv_format", QUANTIZED, ids=lambda row: row.name)
def test_every_instruction_set_writes_the_same_codes(
    compiled: Library, kv_format: KvFormat
) -> None:
    import paddle

    rng = np.random.default_rng(4)
    qkv = normal(rng, 300, 3, 67) * np.exp(2 * normal(rng, 300, 1, 1))
    pools = []
    for name in CANDIDATES:
        if refusal(compiled, "rope_and_cache_write", name):
            continue
        force(compiled, name)
        try:
            tensors = kv_format.tensors(key_value_rows(1, 67), 5, 64, "float32")
            caches = [paddle.zeros(list(t.shape), t.dtype) for t in tensors]
            if kv_format.scales == "head":
                caches[2:] = [given_scales(kv_format, 1)] * 2
            compiled.op("regatta_rope_and_cache_write")(
                tensor(qkv.reshape(300, -1), "float32"),
                int32(np.arange(300) % 50),
                int32(np.arange(300)),
                tensor(rope_table(50, 0), "float32"),
                *(None, None, None, caches, None, 1, 1, 67, 1e-6, False, False, False, False),
                kv_format.name,
            )
        finally:
            force(compiled, "")
        pools.append([cache.numpy() for cache in caches])
    for other in pools[1:]:
        for got, wanted in zip(other, pools[0], strict=True):
            np.testing.assert_array_equal(got, wanted)
    # and those of the plain operators
    rows = tensor(qkv[:, 2:], "float32")
    codes, _ = kv_format.quantize(rows, given_scales(kv_format, 1))
    got = pools[0][1].swapaxes(1, 2).reshape(320, 1, -1)[:300]
    assert (got != codes.numpy()).mean() < 1e-4


def test_e4m3_codes_are_those_of_paddle() -> None:
    import paddle

    rng = np.random.default_rng(0)
    values = normal(rng, 5000, 8) * np.exp2(rng.integers(-14, 14, (5000, 1))).astype(np.float32)
    rows = tensor(np.clip(values, -448, 448), "float32")
    row = kv_format_of("fp8")
    codes, _ = row.quantize(rows, paddle.ones([]))
    wanted = rows.astype("float8_e4m3fn")
    np.testing.assert_array_equal(codes.numpy(), wanted.view("uint8").numpy())
    np.testing.assert_array_equal(row.unpack(codes, paddle.ones([1]), 8).numpy(), numpy32(wanted))


def test_bytes_per_token_are_those_of_the_tensors() -> None:
    for row in FORMATS:
        kept = key_value_rows(2, 32)
        tensors = row.tensors(kept, 10, 16, "float32")
        assert len(tensors) == row.num_tensors(kept)
        per_block = [t for t in tensors if len(t.shape) > 2]
        sizes = {"float32": 4, "uint8": 1}
        num_bytes = sum(np.prod(t.shape) * sizes[t.dtype] for t in per_block)
        assert row.bytes_per_token(SPEC.kept, 4) * 160 == SPEC.num_layers * num_bytes


def write_scales(directory: Path, values: dict[str, Any]) -> None:
    (directory / "cachekv_scales.json").write_text(json.dumps(values))


def paddle_nlp_scales() -> dict[str, Any]:
    return {
        f"llama.layers.{layer}.self_attn.cache{which}_matmul.activation_quanter": [
            float(1 + layer), 9.0, 9.0, 2.0, 9.0, 9.0,
        ]
        for layer in range(2)
        for which in "kv"
    }  # fmt: skip


def test_scales_of_query_heads_serve_their_group(tmp_path: Path) -> None:
    write_scales(tmp_path, paddle_nlp_scales())
    layers = head_scales(kv_format_of("int8_static"), tmp_path, SPEC)
    assert layers is not None
    assert layers[1].key == [2 / 127, 2 / 127]
    assert layers[0].value == [1 / 127, 2 / 127]
    layers = head_scales(kv_format_of("fp8"), tmp_path, SPEC)
    assert layers is not None
    assert layers[0].key == [1 / 448, 2 / 448]


def test_scales_of_ranks_lie_side_by_side(tmp_path: Path) -> None:
    """Of three ranks with two of six query heads each; or with both key/value heads, whole."""
    (tmp_path / "config.json").write_text("{}")
    for rank, values in enumerate(([1.0, 1.0], [1.0, 2.0], [2.0, 2.0])):
        scales = dict.fromkeys(paddle_nlp_scales(), values)
        (tmp_path / f"cachekv_scales_{rank}.json").write_text(json.dumps(scales))
    layers = head_scales(kv_format_of("int8_static"), tmp_path, SPEC)
    assert layers is not None
    assert layers[1].key == [1 / 127, 2 / 127]
    for rank in range(3):
        scales = {name: [1.0, 2.0] for name in paddle_nlp_scales()}
        (tmp_path / f"cachekv_scales_{rank}.json").write_text(json.dumps(scales))
    with pytest.raises(UserError, match="other values for query heads of one key/value head"):
        head_scales(kv_format_of("int8_static"), tmp_path, SPEC)


def test_scales_are_as_many_as_their_own_layer_has_heads(tmp_path: Path) -> None:
    spec = SPEC.with_blocks(
        AttentionBlock,
        lambda layer, block: dataclasses.replace(block, num_kv_heads=3) if layer else block,
    )
    made_up = head_scales(kv_format_of("fp8"), tmp_path, spec)
    assert made_up is not None
    assert [len(layer.key) for layer in made_up.values()] == [2, 3]
    write_scales(tmp_path, paddle_nlp_scales())
    layers = head_scales(kv_format_of("int8_static"), tmp_path, spec)
    assert layers is not None
    assert [layers[0].key, layers[1].key] == [[1 / 127, 2 / 127], [2 / 127, 9 / 127, 9 / 127]]


def test_fp8_does_without_a_scale_file(tmp_path: Path) -> None:
    layers = head_scales(kv_format_of("fp8"), tmp_path, SPEC)
    assert layers is not None
    assert layers[1].value == [1.0, 1.0]
    assert head_scales(kv_format_of("int4"), tmp_path, SPEC) is None


BAD_SCALES = {
    "missing": (None, "holds no cachekv_scales.json.*--cachekv_int8_type dynamic"),
    "layer": ("pop", r"has 0 entries that end in layers\.1\.self_attn\.cachek"),
    "heads": ([1.0, 2.0, 3.0], "holds 3 values .*6 query heads, or of 2 key/value heads"),
    "nan": ([1.0, float("nan")], "holds nan; it must be a number"),
    "text": (["a", 1.0], "holds 'a'; it must be a number"),
}


@pytest.mark.parametrize("case", BAD_SCALES)
def test_scale_file_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    change, message = BAD_SCALES[case]
    values = paddle_nlp_scales()
    name = "llama.layers.1.self_attn.cachek_matmul.activation_quanter"
    if change == "pop":
        del values[name]
    elif change is not None:
        values[name] = change
    if change is not None:
        write_scales(tmp_path, values)
    with pytest.raises(UserError, match=message):
        head_scales(kv_format_of("int8_static"), tmp_path, SPEC)


def test_missing_scales_can_be_made_up(tmp_path: Path) -> None:
    layers = head_scales(kv_format_of("int8_static"), tmp_path, SPEC, fake=True)
    assert layers is not None
    assert len(layers) == SPEC.num_layers
    assert layers[0].key == [1.0] * SPEC.num_kv_heads
    write_scales(tmp_path, paddle_nlp_scales())
    assert head_scales(kv_format_of("int8_static"), tmp_path, SPEC, fake=True) != layers


def test_unknown_format_names_the_known_ones(compiled: Library) -> None:
    with pytest.raises(UserError, match=", ".join(KV_FORMATS)):
        kv_format_of("int5")
    problem = QuantizedProblem(kv_format_of("int4"), Problem.of(SHAPES[-1], "float32"))
    problem.kv_format = KvFormat("int5", 4, "token", 2, lambda r, s: (r, s), lambda c, s, d: c)
    with pytest.raises(ValueError, match=r'kv_format is "int5" .*int8_dynamic, fp8, int4'):
        problem.run(compiled)
    problem.kv_format = kv_format_of("dense")
    with pytest.raises(ValueError, match="caches holds 4 tensors for 1 layer of kv_format dense"):
        problem.run(compiled)


def test_wrong_scales_are_refused(compiled: Library) -> None:
    problem = QuantizedProblem(kv_format_of("int8_dynamic"), Problem.of(SHAPES[-1], "float32"))
    problem.values.scale = problem.values.scale[..., :-1].contiguous()
    with pytest.raises(ValueError, match=r"value_scale has shape \[\d+, 2, 15\], expected"):
        problem.run(compiled)


# A tree of six drafts behind token 0: parents by index. Token 5 hangs on token 2, and so on.
PARENTS = (-1, 0, 0, 1, 1, 2, 5)


def tree_words(parents: tuple[int, ...], words: int) -> Array:
    """int32 [tokens, words]: bits of each token's ancestors and its own."""
    bits = np.zeros((len(parents), 32 * words), np.uint8)
    for token, parent in enumerate(parents):
        if parent >= 0:
            bits[token] = bits[parent]
        bits[token, token] = 1
    packed = np.packbits(bits, axis=1, bitorder="little")
    words32: Array = packed.view(np.int32)
    return words32


def tree_attention(problem: QuantizedProblem, parents: tuple[int, ...], span: int) -> Array:
    """Each token of one span over its ancestors alone, as a sequence of its own. float64."""
    p, shape = problem.problem, problem.problem.batch.shape
    keys = p.batch.context_rows(problem.keys.values)[span]
    values = p.batch.context_rows(problem.values.values)[span]
    count, context = shape.spans[span]
    first, start = context - count, int(p.batch.borders[span])
    rows = []
    for token in range(count):
        path, at = [token], parents[token]
        while at >= 0:
            path, at = [at, *path], parents[at]
        seen = [*range(first), *(first + i for i in path)]
        alone = Shape(
            shape.num_heads, shape.num_kv_heads, shape.head_dim, 16, ((1, len(seen)),), shape.window
        )
        q = p.q[start + token : start + token + 1]
        rows.append(attention(alone, q, [keys[seen]], [values[seen]], p.scale)[0])
    return np.array(rows)


@pytest.mark.parametrize("window", [-1, 30])
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("name", ["int8_dynamic", "int4"])
def test_tree_of_drafts_sees_ancestors_only(
    compiled: Library, candidate: str, name: str, words: int, window: int
) -> None:
    # A tree over the border of two chunks, a plain prompt longer than the mask, a chain.
    shape = Shape(6, 2, 32, 16, ((7, 67), (70, 75), (2, 600)), window)
    problem = QuantizedProblem(kv_format_of(name), Problem.of(shape, "float32"))
    mask = np.zeros((79, words), np.int32)
    mask[:7] = tree_words(PARENTS, words)
    mask[77:] = tree_words((-1, 0), words)
    expected = problem.expected()
    expected[:7] = tree_attention(problem, PARENTS, 0)
    assert_close(problem.run(compiled, int32(mask)), expected, "float32")


def test_plain_operators_see_the_same_tree(compiled: Library) -> None:
    from predict.nn.blocks import Linear
    from predict.nn.inputs import StepInputs
    from predict.ops import compiled as ops
    from predict.ops import plain as reference

    none = Linear("dense", (), None, 0, 0)
    for window in (-1, 30):
        shape = Shape(6, 2, 32, 16, ((7, 67), (40, 45), (2, 600)), window)
        problem = QuantizedProblem(kv_format_of("int4"), Problem.of(shape, "float32"))
        p, batch = problem.problem, problem.problem.batch
        mask = np.zeros((49, 1), np.int32)
        mask[:7] = tree_words(PARENTS, 1)
        mask[47:] = tree_words((-1, 0), 1)
        norm = tensor([1.0], "float32")
        weights = attention_of(
            none, none, norm, (6, 2, 32), None, window, p.scale, kv_format="int4"
        )
        borders, lengths, tables, longest = batch.index_tensors()
        inputs = StepInputs(
            None,
            int32(batch.positions),
            int32(batch.slots),
            borders,
            lengths,
            tables,
            None,
            longest,
        )
        cache = problem.keys.codes, problem.values.codes, problem.keys.scale, problem.values.scale
        q = tensor(p.q.reshape(49, -1), "float32")
        plain, fused = (
            backend.paged_attention(q, weights, cache, inputs, int32(mask)).numpy()
            for backend in (reference, ops)
        )
        assert_close(fused, plain, "float32")


def test_formats_that_a_gpu_lacks_are_refused_by_name() -> None:
    for row in FORMATS:
        row.check_gpu((9, 0))
    with pytest.raises(UserError, match=r"fp8 needs .* sm_89 .* sm_80 .*int8_dynamic, int4\)"):
        kv_format_of("fp8").check_gpu((8, 0))


def test_tree_whose_children_come_first_is_refused(compiled: Library) -> None:
    problem = QuantizedProblem(
        kv_format_of("int4"), Problem.of(Shape(2, 1, 32, 16, ((3, 9),)), "float32")
    )
    with pytest.raises(ValueError, match=r"last bit of tree_mask\[1\] is 2 \(allowed: 1, the"):
        problem.run(compiled, int32([[1], [7], [7]]))


def test_latents_in_fp8_are_codes_tails_and_scales() -> None:
    kept = block_of(4, (64, 32, 16, 32)).cache_rows
    fp8 = kv_format_of("fp8", LATENT_FORMATS)
    tensors = fp8.tensors(kept, 7, 16, "bfloat16")
    assert tensors == (
        CacheTensor("latent_cache", (7, 1, 16, 64), "uint8"),
        CacheTensor("latent_tail_cache", (7, 1, 16, 16), "bfloat16"),
        CacheTensor("latent_scale", (7, 1, 16), "float32"),
    )
    assert fp8.num_tensors(kept) == len(fp8.paged(tensors)) == 3
    dense = kv_format_of("dense", LATENT_FORMATS).tensors(kept, None, 16, "bfloat16")
    assert dense == (CacheTensor("latent_cache", (-1, 1, 16, 80), "bfloat16"),)


@pytest.mark.parametrize("size", [1e-20, 1.0, 3e4])
def test_codes_of_latents_keep_four_bits_of_each_value(size: float) -> None:
    fp8 = kv_format_of("fp8", LATENT_FORMATS)
    rows = size * normal(np.random.default_rng(2), 50, 96)
    rows[3] = 0.0
    codes, scale = fp8.quantize(tensor(rows, "float32"), None)
    assert scale is not None
    assert (numpy32(scale) > 0).all()
    got = numpy32(fp8.unpack(codes, scale, 96))
    step = np.maximum(np.abs(rows) / 16, numpy32(scale)[:, None] / 1024)
    assert (np.abs(got - rows) <= 1.001 * step).all()
    np.testing.assert_allclose(np.abs(got).max(axis=1), np.abs(rows).max(axis=1), rtol=1e-6)
