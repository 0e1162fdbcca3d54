"""Latent attention: the compiled block, its two forms and its plain twin give the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from predict.device.library import Library
from predict.nn.blocks import BlockStep, Norm, Positions, Residual
from predict.nn.cache_formats import LATENT_FORMATS
from predict.nn.decoder import map_tensors
from predict.nn.inputs import StepInputs
from predict.nn.kinds.latent_attention import LatentAttentionBlock, LatentForm
from predict.ops import compiled as ops
from predict.ops import plain
from predict.ops.records import text_of
from tests.support.cpu_kernels import (
    DTYPES,
    PAIRED,
    Array,
    int32,
    normal,
    numpy32,
    tensor,
    threads,
)
from tests.support.latents import (
    RMS,
    LatentBatch,
    Latents,
    block_of,
    check_codes,
    rows_of_cache,
)
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

OPERATOR = "latent_attention_block"  # whose candidates the fixture `candidate` goes through
HIDDEN = 72
FORMS: tuple[LatentForm, ...] = ("absorbed", "expanded")
KV_FORMATS = tuple(row.name for row in LATENT_FORMATS)
# Heads: powers of two and not; sizes that fill vectors and panels, and that do not.
BLOCKS = {
    "published": block_of(4, (64, 32, 16, 32), 48),
    "without q_lora": block_of(3, (40, 24, 8, 20), 0),
    "odd sizes": block_of(5, (37, 13, 6, 11), 21, interleaved=False),
    "one head": block_of(1, (96, 16, 32, 48), 0),
    "many heads": block_of(40, (32, 8, 8, 8), 16),
    "values longer than keys": block_of(2, (32, 8, 8, 24), 0),
    "everything else": block_of(
        3,
        (48, 16, 16, 32),
        20,
        a_bias=True,
        out_bias=True,
        norm=Norm("layer", 1e-5, bias=False),
        post_norm=RMS,
        residual=Residual("normed", 0.5, 1.5),
    ),
}
# New tokens and contexts: decode, a chunk behind a past, prompts; more than a split, and borders.
SPANS = ((1, 1), (1, 70), (5, 5), (1, 530), (37, 90), (0, 0), (65, 128))


def step(
    backend: Any,
    latents: Latents,
    given: LatentBatch,
    hidden: Array,
    mask: Any = None,
    read: Sequence[Any] | None = None,
) -> tuple[Array, Sequence[Any]]:
    """The block's output and the cache behind the step.

    read: a cache that holds the step's own latents too; nothing is written then.
    """
    compiled = backend is ops
    dtype = latents.dtype if compiled else "float32"
    weights = latents.packed() if compiled else latents.weights
    if not compiled:
        weights = map_tensors(weights, lambda _, part: part.astype("float32"))
    cache = given.cache(latents.dtype, latents) if read is None else read
    codes = latents.weights.kv_format != "dense"
    values = [part.astype(dtype) for part in cache[codes : 1 + codes]]
    cache = (cache[0], *values, cache[2]) if codes else tuple(values)
    inputs = StepInputs(*given.batch.step()[:8])
    if read is not None:
        inputs = inputs._replace(slot_mapping=inputs.slot_mapping * 0 - 1)
    ropes = latents.ropes(given.longest + 1)
    out, written = backend.block(
        tensor(hidden, latents.dtype).astype(dtype), weights, BlockStep(cache, ropes, inputs, mask)
    )
    return numpy32(out), written


def run(
    backend: Any, latents: Latents, given: LatentBatch, hidden: Array, mask: Any = None
) -> tuple[Array, Array]:
    """The block's output and the rows of the cache behind the step."""
    out, written = step(backend, latents, given, hidden, mask)
    return out, rows_of_cache(written, latents.weights)


def case_of(
    name: str, dtype: str, form: LatentForm, kv_format: str = "dense"
) -> tuple[Latents, LatentBatch, Array]:
    latents = Latents.of(BLOCKS[name], dtype, HIDDEN).in_form(form).in_format(kv_format)
    given = LatentBatch.of(latents.block, SPANS, 16)
    return latents, given, normal(np.random.default_rng(5), given.batch.shape.num_tokens, HIDDEN)


def close(got: Array, wanted: Array, dtype: str) -> None:
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    assert_close(np.nan_to_num(got), np.nan_to_num(wanted), dtype, BLOCK_ROUNDINGS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(BLOCKS))
def test_compiled_block_equals_its_plain_twin(
    compiled: Library, candidate: str, name: str, dtype: str, form: LatentForm
) -> None:
    if candidate not in PAIRED and name not in ("published", "odd sizes"):
        pytest.skip("the first candidate runs every block")
    latents, given, hidden = case_of(name, dtype, form)
    if candidate in PAIRED and dtype == "bfloat16" and latents.block.latent_size % 2:
        with pytest.raises(ValueError, match="head_dim is odd"):
            run(ops, latents, given, hidden)
        return
    for got, wanted in zip(
        run(ops, latents, given, hidden), run(plain, latents, given, hidden), strict=True
    ):
        close(got, wanted, dtype)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_glm_4_7_flash_equal_their_plain_twins(
    compiled: Library, dtype: str, form: LatentForm, kv_format: str
) -> None:
    """20 heads, keys of 192 + 64 and values of 256, in tiles that other models' do not fill."""
    block = block_of(20, (512, 192, 64, 256), 768)
    latents = Latents.of(block, dtype, HIDDEN).in_form(form).in_format(kv_format)
    given = LatentBatch.of(block, ((1, 70), (37, 90), (0, 0), (1, 1)), 16)
    hidden = normal(np.random.default_rng(5), given.batch.shape.num_tokens, HIDDEN)
    got, written = step(ops, latents, given, hidden)
    close(got, step(plain, latents, given, hidden, read=written)[0], dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["published", "odd sizes", "everything else"])
def test_codes_are_written_and_read_as_by_the_plain_twin(
    compiled: Library, candidate: str, name: str, dtype: str, form: LatentForm
) -> None:
    latents, given, hidden = case_of(name, dtype, form, "fp8")
    if candidate in PAIRED and dtype == "bfloat16" and latents.block.latent_size % 2:
        with pytest.raises(ValueError, match="head_dim is odd"):
            run(ops, latents, given, hidden)
        return
    got, written = step(ops, latents, given, hidden)
    # Of the same codes: one beside the middle of two falls to either.
    close(got, step(plain, latents, given, hidden, read=written)[0], dtype)

    def kept(cache: Sequence[Any]) -> Array:
        rows = given.batch.context_rows(rows_of_cache(cache, latents.weights))
        return np.concatenate([each for each in rows if len(each)])[:, 0]

    rows, wanted = kept(written), kept(step(plain, latents, given, hidden)[1])
    rank = latents.block.kv_lora_rank
    check_codes(rows[:, :rank], wanted[:, :rank], 1e-3 if dtype == "float32" else 0.1)
    close(rows[:, rank:], wanted[:, rank:], dtype)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("backend", [ops, plain])
@pytest.mark.parametrize("name", list(BLOCKS))
def test_forms_differ_by_rounding_alone(
    compiled: Library, backend: Any, name: str, kv_format: str
) -> None:
    absorbed, expanded = (
        run(backend, *case_of(name, "float32", form, kv_format)) for form in FORMS
    )
    assert_close(absorbed[0], expanded[0], "float32", BLOCK_ROUNDINGS)
    np.testing.assert_array_equal(absorbed[1], expanded[1])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_on_any_number_of_threads(
    compiled: Library, dtype: str, form: LatentForm, kv_format: str
) -> None:
    latents, given, hidden = case_of("published", dtype, form, kv_format)
    together, _ = run(ops, latents, given, hidden)
    with threads(compiled, 1):
        np.testing.assert_array_equal(run(ops, latents, given, hidden)[0], together)
    start = 0
    for span, past in zip(SPANS, given.past, strict=True):
        if span[0]:
            alone = LatentBatch.of(latents.block, (span,), 32)
            alone = replace(alone, past=[past])
            got, _ = run(ops, latents, alone, hidden[start : start + span[0]])
            np.testing.assert_array_equal(got, together[start : start + span[0]])
        start += span[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [1, 50, 800])
def test_a_long_prompt_equals_its_chunks(compiled: Library, form: LatentForm, size: int) -> None:
    """A block takes 768 tokens at a time."""
    latents = Latents.of(BLOCKS["without q_lora"], "float32", HIDDEN).in_form(form)
    length = 1600 if size > 1 else 90
    given = LatentBatch.of(latents.block, ((3, 9), (length, length)), 16)
    hidden = normal(np.random.default_rng(8), length + 3, HIDDEN)
    whole, cache = run(ops, latents, given, hidden)
    chunks, rows = [], given.batch.context_rows(cache)[1]
    for begin in range(0, length, size):
        end = min(begin + size, length)
        alone = LatentBatch.of(latents.block, ((end - begin, end),), 16)
        got, _ = run(ops, latents, replace(alone, past=[rows[:end]]), hidden[3 + begin : 3 + end])
        chunks.append(got)
    np.testing.assert_array_equal(np.concatenate(chunks), whole[3:])


@pytest.mark.parametrize("kv_format", KV_FORMATS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", [ops, plain])
def test_a_draft_sees_its_ancestors(
    compiled: Library, backend: Any, form: LatentForm, kv_format: str
) -> None:
    latents = Latents.of(BLOCKS["published"], "float32", HIDDEN).in_form(form).in_format(kv_format)
    given = LatentBatch.of(latents.block, ((3, 40), (7, 67)), 16)
    hidden = normal(np.random.default_rng(6), 10, HIDDEN)
    # Bits of ancestors: 0 - (1 - (3, 4), 2 - (5 - 6)); a chain of three before it.
    mask = int32([[1], [3], [7], *([bits] for bits in (1, 3, 5, 11, 19, 37, 101))])
    tree, _ = run(backend, latents, given, hidden, mask)
    chain, cache = run(backend, latents, given, hidden)
    np.testing.assert_allclose(tree[:5], chain[:5], rtol=1e-5, atol=1e-5)
    # Draft 6's line as a chain of its own: 0, 2, 5, 6 at their depths' rotary rows.
    line, rows = [0, 2, 5, 6], given.batch.context_rows(cache)[1]
    alone = LatentBatch.of(latents.block, ((4, 64),), 16)
    kept = np.concatenate([rows[:60], rows[[60 + i for i in line]]])
    positions = int32([60 + i for i in line])
    inputs = StepInputs(*alone.batch.step()[:8])._replace(positions=positions)
    alone = replace(alone, past=[kept])
    weights = latents.packed() if backend is ops else latents.weights
    out, _ = backend.block(
        tensor(hidden[[3 + i for i in line]], "float32"),
        weights,
        BlockStep(alone.cache("float32", latents), latents.ropes(80), inputs, None),
    )
    np.testing.assert_allclose(tree[[3 + i for i in line]], numpy32(out), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_some_of_all(compiled: Library, form: LatentForm) -> None:
    latents, given, hidden = case_of("published", "float32", form)
    whole, _ = run(ops, latents, given, hidden)
    wanted = [0, 3, 60]
    inputs = StepInputs(*given.batch.step()[:8])
    for backend, weights in ((ops, latents.packed()), (plain, latents.weights)):
        out, _ = backend.block(
            tensor(hidden, "float32"),
            weights,
            BlockStep(
                given.cache("float32"),
                latents.ropes(given.longest + 1),
                inputs,
                None,
                int32(wanted),
            ),
        )
        assert_close(numpy32(out), whole[wanted], "float32", BLOCK_ROUNDINGS)


def test_the_cheaper_form_is_one_of_both(compiled: Library) -> None:
    """Decode rows are absorbed, a prompt of many tokens is expanded: bit for bit."""
    spans = ((1, 200), (300, 300), (1, 7))
    latents = Latents.of(BLOCKS["published"], "float32", HIDDEN)
    given = LatentBatch.of(latents.block, spans, 16)
    hidden = normal(np.random.default_rng(1), 302, HIDDEN)
    cheaper, absorbed, expanded = (
        run(ops, latents.in_form(form), given, hidden)[0] for form in ("cheaper", *FORMS)
    )
    decoded = [0, 301]
    np.testing.assert_array_equal(cheaper[decoded], absorbed[decoded])
    np.testing.assert_array_equal(cheaper[1:301], expanded[1:301])
    assert not np.array_equal(absorbed, expanded)


BLOCK_TEXT = text_of(BLOCKS["published"], qkv_a="dense", q_b="dense", out="dense")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("num_heads=4", "num_heads=0", r"num_heads 0, kv_lora_rank 64, .*allowed: 1 and more"),
        ("kv_lora_rank=64", "kv_lora_rank=-1", r"kv_lora_rank -1"),
        ("form=cheaper", "form=cheap", r"form is 'cheap' .allowed: cheaper, absorbed, expanded"),
        ("q_lora_rank=48", "q_lora_rank=0", r"q_a_norm without q_lora_rank"),
        ("positions.kind=rotary", "positions.kind=none", r"latents have other positions"),
        ("out=dense", "out=dense kv_format=int4", r"have kv_format int4 .allowed: dense, fp8"),
    ],
)
def test_what_a_record_cannot_be_is_named(compiled: Library, old: str, new: str, said: str) -> None:
    assert old in BLOCK_TEXT
    _, given, hidden = case_of("published", "float32", "cheaper")
    x = tensor(hidden, "float32")
    with pytest.raises(ValueError, match=said):
        compiled.op("regatta_blocks")(
            *(x, [x], [*given.cache("float32")], given.batch.step(), None, None),
            *(BLOCK_TEXT.replace(old, new), [0]),
        )


def test_what_contradicts_itself_is_refused() -> None:
    block = BLOCKS["published"]
    with pytest.raises(ValueError, match=r"q_lora_rank is 48, and q_a_norm None"):
        replace(block, q_a_norm=None)
    with pytest.raises(ValueError, match=r"allowed: rotary, of one dimension"):
        replace(block, positions=Positions("alibi"))
    assert isinstance(block, LatentAttentionBlock)
