"""Latent attention on the GPU, by matrix units and without, against the plain twin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM
from predict.device import devices, library
from predict.nn import inputs
from predict.nn.adapter_pages import adapted_slots
from predict.nn.blocks import Norm
from predict.nn.decoder import map_tensors
from predict.nn.inputs import max_lens_of, to_tensors
from predict.nn.kinds.latent_attention import LatentAttention, LatentAttentionBlock, LatentForm
from predict.nn.rope import rope_table
from predict.nn.spec import RopeSpec
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.golden import GOLDEN
from tests.support.gpu_adapters import adapted, pooled, spoiled
from tests.support.gpu_latents import on_gpu, weights_of
from tests.support.gpu_operands import (
    BLOCK_SIZES,
    Heads,
    Operands,
    Span,
    Step,
    compare,
    decode_spans,
    numpy_of,
    prefill_spans,
)
from tests.support.latents import check_codes, coded_pool, rows_of_cache
from tests.support.quantized_caches import config, greedy
from tests.support.tolerances import assert_close

DTYPES = ("float32", "bfloat16", "float16")
HIDDEN, POSITIONS = 128, 6000
ROUNDINGS = 8  # norms, four products, weights, latents
FORMS = {
    "16 heads": LatentAttentionBlock(16, 64, 32, 32, 48, 0.1),
    "3 heads": LatentAttentionBlock(3, 96, 16, 32, 32, 0.1),
    "odd sizes": LatentAttentionBlock(3, 24, 16, 8, 20, 0.1),
    "32 heads": LatentAttentionBlock(32, 64, 16, 32, 16, 0.1),
    "128 heads": LatentAttentionBlock(128, 512, 16, 64, 16, 0.05),
    # Of Hopper's own kernel, as those are; its blocks are in sixteens and in sixty-fours.
    "16 heads of DeepSeek": LatentAttentionBlock(16, 512, 16, 64, 16, 0.05),
    "20 heads of 512 values": LatentAttentionBlock(20, 512, 16, 64, 16, 0.05),
    "16 heads as published": LatentAttentionBlock(16, 512, 128, 64, 128, 0.07),
    "128 published": LatentAttentionBlock(128, 512, 128, 64, 128, 0.07),
    "queries of a rank": LatentAttentionBlock(
        20, 64, 32, 32, 48, 0.1, q_lora_rank=40, q_a_norm=Norm()
    ),
}


def tree_masks(operands: Operands, spans: Sequence[Span]) -> Any:
    """int32 [T, 1]: of each token its parent's bits, or none, and its own."""
    masks: list[int] = []
    for span in spans:
        first = len(masks)
        for token in range(span.new):
            parent = operands.generator.integers(-1, token)
            masks.append(1 << token | (masks[first + parent] if parent >= 0 else 0))
    return np.array(masks, np.uint32).view(np.int32)[:, None]


def with_pages(operands: Operands, weights: LatentAttention) -> LatentAttention:
    """The plain block with random pages of adapters."""
    names = [slot.name for slot in adapted_slots(weights.block, HIDDEN)]
    linears: dict[str, Any] = {
        name: pooled(operands, getattr(weights, name), weights.block, name, HIDDEN)
        for name in names
    }
    return replace(weights, **linears)


class Problem:
    """A block and a step over a cache of its latents, on the CPU and on the GPU."""

    def __init__(
        self,
        operands: Operands,
        form: str,
        kv_format: str,
        spans: Sequence[Span],
        block_size: int = 0,
        trees: bool = False,
        latent_form: LatentForm = "cheaper",
        num_padding: int = 0,
        with_adapters: bool = False,
    ):
        """block_size: 0 for one that the form has. trees: spans are trees of drafts."""
        import paddle

        block = replace(FORMS[form], form=latent_form)
        self.operands = operands
        with operands.on_cpu():
            self.weights = replace(weights_of(operands, block, HIDDEN), kv_format=kv_format)
            if with_adapters:
                self.weights = with_pages(operands, self.weights)
            placed = on_gpu(operands, self.weights)
        self.placed = map_tensors(placed, spoiled)
        table = rope_table(RopeSpec(), block.qk_rope_head_dim, POSITIONS, POSITIONS)
        self.ropes = (paddle.to_tensor(table, place=paddle.CPUPlace()),)
        self.device_ropes = (operands.placed(table),)
        heads = Heads(block.num_heads, 1, block.latent_size)
        self.block_size = block_size or BLOCK_SIZES[len(form) % len(BLOCK_SIZES)]
        self.step = Step(operands, spans, heads, self.block_size, num_padding)
        if with_adapters:
            adapted(self.step)
        self.hidden = operands.tensor(self.step.num_tokens, HIDDEN)
        self.trees = tree_masks(operands, spans) if trees else None

    def caches(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What requests kept before the step: plain, and the GPU's."""
        pool = self.step.pools[0]
        if self.weights.kv_format == "dense":
            cache = self.operands.both(pool)
            return (cache.plain,), (cache.device,)
        with self.operands.on_cpu():
            codes, tail, scale = coded_pool(pool, self.weights, self.operands.dtype)
            plain = codes, tail.astype("float32"), scale
            place = self.operands.gpu.place()
            return plain, tuple(part._copy_to(place, True) for part in (codes, tail, scale))

    def on_device(
        self, of_last_rows: bool = False, hidden: Any = None, inputs: Any = None
    ) -> tuple[Any, tuple[Any, ...]]:
        """The block's output, and its cache brought to the CPU; of another step, if it is given."""
        if of_last_rows:
            inputs = self.step.of_rows(self.step.arrays.logit_indices)
        out, written = ops.layers(
            self.hidden.device if hidden is None else hidden,
            [(self.placed,)],
            [self.caches()[1]],
            self.device_ropes,
            self.step.device if inputs is None else inputs,
            None if self.trees is None else self.operands.placed(self.trees),
            rows=self.step.device.logit_indices if of_last_rows else None,
        )
        return out, tuple(part.cpu() for part in written)

    def on_plain_twin(self, read: tuple[Any, ...] | None = None) -> tuple[Any, tuple[Any, ...]]:
        """The same by plain operators; read: a cache to which they write nothing."""
        import paddle

        cache, inputs = self.caches()[0], self.step.plain
        with self.operands.on_cpu():
            trees = None if self.trees is None else paddle.to_tensor(self.trees)
            if read is not None:
                cache = tuple(
                    mine.astype(plain.dtype) for mine, plain in zip(read, cache, strict=True)
                )
                inputs = inputs._replace(slot_mapping=inputs.slot_mapping * 0 - 1)
            out, written = reference.layers(
                self.hidden.plain, [(self.weights,)], [cache], self.ropes, inputs, trees
            )
        return out, tuple(written)

    def rows(self, cache: tuple[Any, ...]) -> Any:
        """float32 [T, L + R]: what the step's own tokens left in a cache."""
        slots = self.step.arrays.slot_mapping[self.step.arrays.slot_mapping >= 0]
        with self.operands.on_cpu():
            rows = rows_of_cache(cache, self.weights)
        return rows[slots // self.block_size, 0, slots % self.block_size]


def check(problem: Problem, roundings: int = ROUNDINGS) -> None:
    """Asserts that the GPU makes what the plain twin makes of the cache that the GPU has written.

    Of codes: one beside the middle of two falls to either.
    """
    got, written = problem.on_device()
    assert np.isfinite(numpy_of(got)).all()
    compare(got, problem.on_plain_twin(read=written)[0], problem.operands.dtype, roundings)


def spans_of(make: Any, form: str) -> list[Span]:
    spans: list[Span] = make(BLOCK_SIZES[len(form) % len(BLOCK_SIZES)])
    if FORMS[form].num_heads > 64:
        spans = [span for span in spans if span.cached + span.new < 1000][:6]
    return spans


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
@pytest.mark.parametrize("adapters", [False, True])
def test_latent_attention_equals_the_plain_twin(
    gpu: devices.Device, dtype: str, form: str, make: Any, adapters: bool
) -> None:
    spans = [span for span in spans_of(make, form) if span.new or not adapters]
    problem = Problem(Operands(gpu, dtype), form, "dense", spans, with_adapters=adapters)
    roundings = 2 * ROUNDINGS if adapters else ROUNDINGS
    got, written = problem.on_device()
    wanted, kept = problem.on_plain_twin()
    compare(got, wanted, dtype, roundings)
    compare(written[0], kept[0], dtype, roundings)
    if not adapters:
        return
    last, _ = problem.on_device(of_last_rows=True)
    rows = problem.step.arrays.logit_indices
    assert_close(numpy_of(last), numpy_of(wanted)[rows], dtype, roundings)


@pytest.mark.parametrize("form", ["16 heads of DeepSeek", "20 heads of 512 values", "128 heads"])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("trees", [False, True])
def test_drafts_over_contexts_of_any_length_equal_the_plain_twin(
    gpu: devices.Device, form: str, block_size: int, trees: bool
) -> None:
    contexts = (1, 63, 64, 65, 1000, *([] if form == "128 heads" else [5500]))
    spans = [Span(max(0, length - 1 - i % 5), 1 + i % 5) for i, length in enumerate(contexts)]
    problem = Problem(Operands(gpu, "bfloat16"), form, "dense", spans, block_size, trees)
    compare(problem.on_device()[0], problem.on_plain_twin()[0], "bfloat16", ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_codes_of_latents_are_written_and_read_as_by_the_plain_twin(
    gpu: devices.Device, dtype: str, form: str, make: Any
) -> None:
    problem = Problem(Operands(gpu, dtype), form, "fp8", spans_of(make, form))
    check(problem)
    rank = FORMS[form].kv_lora_rank
    rows, wanted = (
        problem.rows(kept) for kept in (problem.on_device()[1], problem.on_plain_twin()[1])
    )
    check_codes(rows[:, :rank], wanted[:, :rank], 1e-3 if dtype == "float32" else 0.1)
    assert_close(rows[:, rank:], wanted[:, rank:], dtype, ROUNDINGS)


# Spans that latent attention expands where the GPU has a kernel for it, and others: LONG_SPAN.
LONG_SPANS = {
    "around the rule": [Span(0, 127), Span(0, 128), Span(0, 129)],
    "mixed": [Span(300, 1), Span(0, 257), Span(40, 3), Span(0, 0), Span(77, 130), Span(0, 5)],
    "alone": [Span(0, 300)],
    "long ones": [Span(131, 128), Span(0, 256), Span(1, 385), Span(700, 200)],
}


@pytest.mark.parametrize(
    ("dtype", "kv_format", "adapters"),
    [
        *(("bfloat16", kv_format, False) for kv_format in ("dense", "fp8")),
        *(("float16", kv_format, False) for kv_format in ("dense", "fp8")),
        ("bfloat16", "dense", True),
    ],
)
@pytest.mark.parametrize("form", ["16 heads as published", "128 published"])
@pytest.mark.parametrize("spans", LONG_SPANS)
def test_long_spans_equal_the_plain_twin(
    gpu: devices.Device, dtype: str, form: str, kv_format: str, spans: str, adapters: bool
) -> None:
    operands, own = Operands(gpu, dtype), LONG_SPANS[spans]
    problem = Problem(operands, form, kv_format, own, with_adapters=adapters)
    check(problem, 2 * ROUNDINGS if adapters else ROUNDINGS)


@pytest.mark.parametrize(
    ("form", "kv_format", "spans"),
    [  # turns of heads, and blocks that share keys of one head
        ("128 published", "dense", [Span(4900, 150), Span(7, 1)]),
        ("16 heads as published", "dense", [Span(5000, 140)]),
        ("16 heads as published", "dense", [Span(0, 4200), Span(4500, 1)]),
        *(  # parts of a context, which are added up
            (form, kv_format, [Span(5000, 1), Span(3, 1), Span(1023, 1)])
            for form in ("16 heads", "16 heads of DeepSeek")
            for kv_format in ("dense", "fp8")
        ),
    ],
)
def test_long_contexts_equal_the_plain_twin(
    gpu: devices.Device, form: str, kv_format: str, spans: list[Span]
) -> None:
    check(Problem(Operands(gpu, "bfloat16"), form, kv_format, spans))


def test_the_form_says_whether_long_spans_are_expanded(gpu: devices.Device) -> None:
    """The rest of the step is the same for all of them, and near where they differ."""
    spans = [Span(0, 128), Span(50, 20)]
    forms: tuple[LatentForm, ...] = ("cheaper", "expanded", "absorbed")
    cheaper, expanded, absorbed = (
        numpy_of(
            Problem(
                Operands(gpu, "bfloat16"),
                "16 heads as published",
                "dense",
                spans,
                latent_form=form,
                num_padding=3,
            ).on_device()[0]
        )[:148]
        for form in forms
    )
    np.testing.assert_array_equal(cheaper, expanded)
    assert not np.array_equal(cheaper[:128], absorbed[:128])
    assert_close(cheaper, absorbed, "bfloat16", ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["16 heads", "odd sizes", "128 heads", "16 heads of DeepSeek"])
@pytest.mark.parametrize("kv_format", ["dense", "fp8"])
def test_a_decoded_token_does_not_depend_on_a_prompt_beside_it(
    gpu: devices.Device, dtype: str, form: str, kv_format: str
) -> None:
    problem = Problem(Operands(gpu, dtype), form, kv_format, [Span(300, 1), Span(70, 40)])
    both = problem.step.arrays
    alone = both._replace(
        **{name: getattr(both, name)[:1] for name in ("token_ids", "positions", "slot_mapping")},
        cu_seqlens_q=both.cu_seqlens_q[:2],
        context_lens=both.context_lens[:1],
        block_tables=both.block_tables[:1],
        logit_indices=both.logit_indices[:1],
        max_lens=max_lens_of([1], [301]),
    )
    values, rows = numpy_of(problem.hidden.plain), []
    with library.require().batch_invariant():
        for arrays in (both, alone):
            hidden = problem.operands.both(values[: len(arrays.token_ids)]).device
            made, _ = problem.on_device(hidden=hidden, inputs=to_tensors(arrays, gpu.place()))
            rows.append(numpy_of(made)[0])
    np.testing.assert_array_equal(*rows)


def test_engine_gives_the_same_text_from_a_cache_of_codes(gpu: devices.Device) -> None:
    prompt = [[5, *range(7, 52), 3]]
    settings: dict[str, Any] = {"cachekv_int8_type": "fp8", "attention": "append"}
    llm = LLM(config(GOLDEN / "deepseek_v2", device="gpu", **settings))
    first = greedy(llm, prompt)
    assert greedy(llm, prompt) == first
    assert llm.stats().num_prefix_hit_tokens == 32


@pytest.mark.parametrize("attention", ["block", "append"])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_engine_gives_the_same_text_with_long_spans(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch, name: str, attention: str
) -> None:
    """Spans of tiny models are long here; on GPUs without a kernel of their sizes nothing changes.

    Chunks of prompts that are computed in several steps have contexts before them.
    """
    settings: dict[str, Any] = {"attention": attention, "device": "gpu", "batch_size": 3}
    if attention == "append":
        settings["max_num_batched_tokens"] = 30
    wanted = greedy(LLM(config(GOLDEN / name, **settings)))
    monkeypatch.setattr(inputs, "LONG_SPAN", 20)
    assert greedy(LLM(config(GOLDEN / name, **settings))) == wanted


def test_exported_program_expands_long_spans(gpu: devices.Device, tmp_path: Path) -> None:
    """A model of DeepSeek's head sizes, whose prompts are chunks, whole ones, and prefix hits."""
    sizes = {
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 1024,
    }
    model = tmp_path / "model"
    model.mkdir()
    published = json.loads((GOLDEN / "deepseek_v2_lite" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**published, **sizes}))
    settings: dict[str, Any] = {
        "device": "gpu",
        "dtype": "bfloat16",
        "attention": "append",
        "batch_size": 2,
        "max_length": 600,
        "max_num_batched_tokens": 300,
    }
    prompts = [[5, *(7 + i % 40 for i in range(length)), 3] for length in (140, 500, 20, 510)]
    made = config(model, load_format="dummy", **settings)
    llm = LLM(made)
    dynamic = greedy(llm, prompts)
    export_model(made, tmp_path / "static")
    assert greedy(LLM(config(tmp_path / "static", mode="static", **settings)), prompts) == dynamic
