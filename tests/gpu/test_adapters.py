"""Adapters of requests on the GPU: layers against the plain twin, answers against merged ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict.device import devices
from predict.llm import LLM
from predict.loading.build import fold_norms
from predict.nn.adapter_pages import part_sizes
from predict.nn.blocks import ADAPTED, PAGE_RANKS
from predict.nn.decoder import Attention, Layer, Linear, LowRank, Mlp, map_tensors
from predict.nn.inputs import to_tensors
from predict.ops import compiled as ops
from predict.ops import plain as reference
from predict.request import RequestOutput, SamplingParams
from tests.support import tiny
from tests.support.adapters import SEVEN, write_seven
from tests.support.block_forms import FORMS, blocks_of, layer_of
from tests.support.gpu_operands import (
    DTYPES,
    Heads,
    Operands,
    Span,
    Step,
    compare,
    decode_spans,
    numpy_of,
    prefill_spans,
)
from tests.support.tolerances import BLOCK_ROUNDINGS, assert_close

NUM_PAGES = 7
# Pages of each adapter, by linear: some have none for some.
PAGES = (
    {"qkv": [3], "out": [3], "gate_up": [3], "down": [3]},
    {"qkv": [0, 5, 1], "down": [0, 5, 1]},
    {"out": [6, 2], "gate_up": [6, 2]},
)
HEADS = (8, 2, 64)


def with_pages(operands: Operands, layer: Layer) -> Layer:
    """The plain layer with random pages."""

    attention, mlp = layer
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    hidden = attention.out.out_features

    def pooled(linear: Linear, block: Any, name: str) -> Linear:
        sizes = part_sizes(block, name, hidden)
        width = linear.in_features
        a = operands.tensor(
            NUM_PAGES, len(sizes), PAGE_RANKS, width, scale=width**-0.5 / PAGE_RANKS
        ).plain
        b = operands.tensor(NUM_PAGES, PAGE_RANKS, linear.out_features).plain
        return replace(linear, low_rank=LowRank(a, b, sizes))

    with operands.on_cpu():
        return (
            replace(
                attention,
                qkv=pooled(attention.qkv, attention.block, "qkv"),
                out=pooled(attention.out, attention.block, "out"),
            ),
            replace(
                mlp,
                gate_up=pooled(mlp.gate_up, mlp.block, "gate_up"),
                down=pooled(mlp.down, mlp.block, "down"),
            ),
        )


def on_gpu(operands: Operands, layer: Layer) -> Layer:
    """As the kernels take it; page 4, which is nobody's, holds NaN."""

    def spoiled(path: str, tensor: Any) -> Any:
        if path.endswith(("low_rank_a", "low_rank_b")):
            tensor[4] = float("nan")
        return tensor

    return map_tensors(operands.on_gpu(layer), spoiled)


def adapted(step: Step) -> None:
    """Gives every request but each fourth one an adapter."""
    import paddle

    num_seqs = len(step.arrays.context_lens)
    pages = np.full((num_seqs, len(ADAPTED), 3), -1, np.int32)
    rows = np.full(num_seqs, -1, np.int32)
    for row in range(num_seqs):
        if row % 4 == 3:
            continue
        rows[row] = row
        for name, own in PAGES[row % 4].items():
            pages[row, ADAPTED.index(name), : len(own)] = own
    ids = np.full(step.num_tokens, -1, np.int32)
    lengths = np.diff(step.arrays.cu_seqlens_q)
    ids[: lengths.sum()] = np.repeat(rows, lengths)
    step.arrays = step.arrays._replace(adapter_ids=ids, adapter_pages=pages)
    step.plain = to_tensors(step.arrays, paddle.CPUPlace())
    step.device = to_tensors(step.arrays, step.operands.gpu.place())


def check_layers(
    operands: Operands,
    plain: list[Layer],
    layers: list[Layer],
    step: Step,
    hidden_size: int,
) -> None:
    rope = operands.ropes(Heads(*HEADS))
    hidden = operands.tensor(step.num_tokens, hidden_size)
    pairs = [step.caches() for _ in plain]
    got = ops.layers(hidden.device, layers, [pair[1] for pair in pairs], rope.device, step.device)
    last = ops.last_layer(hidden.device, layers[0], step.caches()[1], rope.device, step.device)
    with operands.on_cpu():
        kept = [pair[0] for pair in pairs]
        wanted = reference.layers(hidden.plain, plain, kept, rope.plain, step.plain)
        whole = reference.layers(
            hidden.plain, plain[:1], [step.caches()[0]], rope.plain, step.plain
        )
    compare(got[0], wanted[0], operands.dtype, 4 * BLOCK_ROUNDINGS)
    for mine, theirs in zip(got[1], wanted[1], strict=True):
        compare(mine, theirs, operands.dtype, 4 * BLOCK_ROUNDINGS)
    rows = step.arrays.logit_indices
    assert_close(numpy_of(last[0]), numpy_of(whole[0])[rows], operands.dtype, 3 * BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_layers_of_every_form(
    gpu: devices.Device, dtype: str, form: str, make: Callable[[int], list[Span]]
) -> None:
    operands = Operands(gpu, dtype)
    step = Step(operands, [span for span in make(32) if span.new], Heads(*HEADS), 32)
    adapted(step)
    for hidden_size, inner in ((256, 320), (100, 36)):
        plain = [
            with_pages(
                operands,
                layer_of(
                    blocks_of(form, HEADS, inner),
                    hidden_size,
                    operands.linear,
                    lambda size, around: operands.tensor(size, around=around, scale=0.1).plain,
                    lambda values: operands.both(values).plain,
                ),
            )
            for _ in range(2)
        ]
        layers = [on_gpu(operands, layer) for layer in plain]
        check_layers(operands, plain, layers, step, hidden_size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_layers_of_llama(
    gpu: devices.Device, dtype: str, folded: bool, make: Callable[[int], list[Span]]
) -> None:
    operands = Operands(gpu, dtype)
    step = Step(operands, [span for span in make(32) if span.new], Heads(*HEADS), 32)
    adapted(step)
    # Inputs of more than one piece of a sum (csrc/cuda/adapters/shrink.cu).
    for hidden_size, inner in ((256, 320), (2304, 4160)):
        plain = [
            with_pages(operands, operands.layer(hidden_size, inner, Heads(*HEADS), bias, False))
            for bias in (False, True)
        ]
        layers: list[Layer] = [on_gpu(operands, layer) for layer in plain]
        if folded:
            layers = [fold_norms(layer, ops) for layer in layers]
        check_layers(operands, plain, layers, step, hidden_size)


FOLDERS = list(SEVEN)[:6]  # one for each prompt
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 11, 30], [5, 9, 11, 30, 7, 8], [101, 3], [77], [14, 15, 16, 17, 18], [60, 61]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = write_seven(tmp_path_factory.mktemp("adapters"), tiny.CONFIG)
    return {name: folders[name] for name in FOLDERS}


def serving(model: Path, folders: dict[str, Path], **settings: Any) -> LLM:
    modules = tuple(f"{name}={path}" for name, path in folders.items())
    fixed = {"device": "gpu", "inference_model": True, "attention": "append", "max_length": 64}
    sizes = {"lora_modules": modules, "max_lora_rank": 64, "batch_size": 8}
    return LLM(model, **{**fixed, **sizes, "num_cache_blocks": 64, **settings})


def steps(output: RequestOutput) -> Any:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    found = [{token: each.logprob for token, each in step.items()} for step in answer.logprobs]
    return answer.token_ids, found


def test_answers_are_those_of_merged_models(
    gpu: devices.Device, tiny_model: Path, folders: dict[str, Path]
) -> None:
    llm = serving(tiny_model, folders, dtype="float32")
    names = [*FOLDERS]
    together = llm.generate(PROMPTS, [replace(GREEDY, adapter=name) for name in names])
    for index, name in enumerate(names):
        merged = serving(tiny_model, {}, dtype="float32", lora_path=folders[name])
        (wanted,) = merged.generate([PROMPTS[index]], GREEDY)
        (tokens, found), (wanted_tokens, theirs) = steps(together[index]), steps(wanted)
        assert tokens == wanted_tokens
        for mine, other in zip(found, theirs, strict=True):
            assert mine == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("quant_type", [None, "weight_only_int8", "weight_only_int4", "a8w8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_batch_gives_each_what_it_has_alone(
    gpu: devices.Device,
    tiny_model: Path,
    folders: dict[str, Path],
    dtype: str,
    quant_type: str | None,
) -> None:
    if dtype == "float32" and quant_type is not None:
        pytest.skip("quantized weights run with 16-bit activations on GPUs")
    settings = {"batch_invariant": True, "prefix_caching": False}
    llm = serving(tiny_model, folders, dtype=dtype, quant_type=quant_type, **settings)
    names = [None, *FOLDERS]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(names))]
    together = llm.generate(prompts, [replace(GREEDY, adapter=name) for name in names])
    for index, name in enumerate(names):
        (alone,) = llm.generate([prompts[index]], replace(GREEDY, adapter=name))
        assert steps(alone) == steps(together[index])


def test_batches_with_and_without_adapters_have_graphs_of_their_own(
    gpu: devices.Device, tiny_model: Path, folders: dict[str, Path]
) -> None:
    llm = serving(tiny_model, folders, dtype="bfloat16")
    plain = serving(tiny_model, {}, dtype="bfloat16")
    for _ in range(2):
        llm.generate([PROMPTS[0]], replace(GREEDY, adapter="wide"))
        (without,) = llm.generate([PROMPTS[0]], GREEDY)
    graphs = {shape.adapted for shape in llm.engine.runner.graphs}  # type: ignore[attr-defined]
    assert graphs == {False, True}
    assert steps(without) == steps(plain.generate([PROMPTS[0]], GREEDY)[0])


@pytest.mark.parametrize(
    ("dtype", "quant_type"),
    [("float32", None), ("bfloat16", None), ("bfloat16", "weight_only_int4")],
)
def test_a_program_answers_as_the_dynamic_model(
    gpu: devices.Device,
    tiny_model: Path,
    folders: dict[str, Path],
    tmp_path: Path,
    dtype: str,
    quant_type: str | None,
) -> None:
    settings = {"dtype": dtype, "quant_type": quant_type, "batch_invariant": True}
    dynamic = serving(tiny_model, folders, **settings)
    export_model(dynamic.config.changed(lora_modules=()), tmp_path / "static", enable_lora=True)
    for modules, names in ((folders, [None, *FOLDERS]), ({}, [None])):
        static = serving(tmp_path / "static", modules, mode="static", max_loras=2, **settings)
        prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(names))]
        asked = [replace(GREEDY, adapter=name) for name in names]
        # Twice: the second time steps are replayed, and blocks of prompts cached.
        for _ in range(2):
            wanted = list(map(steps, dynamic.generate(prompts, asked)))
            assert list(map(steps, static.generate(prompts, asked))) == wanted
        graphs = static.engine.runner.graphs  # type: ignore[attr-defined]
        assert {shape.adapted for shape in graphs} == {True}
