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
from predict.nn.blocks import Linear
from predict.nn.decoder import Layer, map_tensors
from predict.nn.inputs import ADAPTED
from predict.nn.kinds.attention import Attention
from predict.nn.kinds.mlp import Mlp
from predict.ops import compiled as ops
from predict.ops import plain as reference
from predict.request import RequestOutput, SamplingParams
from tests.support import tiny
from tests.support.adapters import SEVEN, write_seven
from tests.support.block_forms import FORMS
from tests.support.drafts import draft_always
from tests.support.family_adapters import write_family_adapter
from tests.support.golden import GOLDEN, golden
from tests.support.gpu_adapters import PAGES, adapted, pages_table, pooled, spoiled, with_ranks
from tests.support.gpu_operands import (
    DTYPES,
    Heads,
    Operands,
    Span,
    Step,
    check_layers,
    compare,
    decode_spans,
    prefill_spans,
)
from tests.support.tolerances import BLOCK_ROUNDINGS

HEADS = (8, 2, 64)


def with_pages(operands: Operands, layer: Layer) -> Layer:
    """The plain layer with random pages."""

    attention, mlp = layer
    assert isinstance(attention, Attention)
    assert isinstance(mlp, Mlp)
    hidden = attention.out.out_features

    def paged(weights: Attention | Mlp, name: str) -> Linear:
        return pooled(operands, getattr(weights, name), weights.block, name, hidden)

    with operands.on_cpu():
        return (
            replace(attention, qkv=paged(attention, "qkv"), out=paged(attention, "out")),
            replace(mlp, gate_up=paged(mlp, "gate_up"), down=paged(mlp, "down")),
        )


def on_gpu(operands: Operands, layer: Layer) -> Layer:
    """As the kernels take it; page 4, which is nobody's, holds NaN."""
    return map_tensors(operands.on_gpu(layer), spoiled)


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
            with_pages(operands, operands.layer_of_form(form, HEADS, hidden_size, inner))
            for _ in range(2)
        ]
        layers = [on_gpu(operands, layer) for layer in plain]
        check_layers(step, Heads(*HEADS), plain, layers, hidden_size, 4 * BLOCK_ROUNDINGS)


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
        check_layers(step, Heads(*HEADS), plain, layers, hidden_size, 4 * BLOCK_ROUNDINGS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part_sizes", [(136,), (96, 32, 32), (33, 7)])
def test_a_linear_with_adapters_equals_its_plain_twin(
    gpu: devices.Device, dtype: str, part_sizes: tuple[int, ...]
) -> None:
    import paddle

    operands = Operands(gpu, dtype)
    for num_rows, width in ((0, 72), (1, 131), (5, 72), (17, 2304), (130, 72), (300, 64)):
        plain = with_ranks(operands, operands.linear(width, sum(part_sizes), True), part_sizes)
        weights = map_tensors(operands.on_gpu(plain), spoiled)
        x = operands.tensor(num_rows, width)
        ids = operands.generator.integers(-1, len(PAGES), num_rows).astype(np.int32)
        placed = operands.placed(ids), operands.placed(pages_table())
        for row in range(len(ADAPTED)):
            got = ops.adapted_linear(x.device, weights, placed[0], placed[1], row)
            if num_rows == 0:
                assert got.shape == [0, sum(part_sizes)]
                continue
            with operands.on_cpu():
                here = paddle.to_tensor(ids), paddle.to_tensor(pages_table())
                wanted = reference.adapted_linear(x.plain, plain, here[0], here[1], row)
            compare(got, wanted, dtype, 3)


def test_ids_of_rows_are_taken(gpu: devices.Device) -> None:
    operands = Operands(gpu, "float32")
    ids = np.array([-1, 7, 2**31 - 1, 0, -(2**31)], np.int32)
    rows = np.array([4, 0, 0, 2, 1], np.int32)
    taken = ops.take_ids(operands.placed(ids), operands.placed(rows))
    np.testing.assert_array_equal(taken.cpu().numpy(), ids[rows])


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


def assert_near(output: RequestOutput, wanted: RequestOutput) -> None:
    """The same tokens, and nearly the same logprobs."""
    (tokens, found), (wanted_tokens, theirs) = steps(output), steps(wanted)
    assert tokens == wanted_tokens
    for mine, other in zip(found, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-3)


def test_answers_are_those_of_merged_models(
    gpu: devices.Device, tiny_model: Path, folders: dict[str, Path]
) -> None:
    llm = serving(tiny_model, folders, dtype="float32")
    names = [*FOLDERS]
    together = llm.generate(PROMPTS, [replace(GREEDY, adapter=name) for name in names])
    for index, name in enumerate(names):
        merged = serving(tiny_model, {}, dtype="float32", lora_path=folders[name])
        assert_near(together[index], *merged.generate([PROMPTS[index]], GREEDY))


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


# Attention over latents, attention that is a sequence of smaller operators, experts.
FAMILIES = (
    *("deepseek_v2_lite", "deepseek_v3", "chatglm_6b", "cohere_qk_norm", "stablelm_12b"),
    "qwen3_moe_30b",
)


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> str:
    """A checkpoint of FAMILIES."""
    name: str = request.param
    return name


@pytest.fixture
def two(case: str, tmp_path: Path) -> dict[str, Path]:
    """Adapters of the case, of one page and of two."""
    return {str(r): write_family_adapter(tmp_path / str(r), case, r, r) for r in (5, 12)}


def serving_case(model: Path | str, folders: dict[str, Path], **settings: Any) -> LLM:
    return serving(GOLDEN / model, folders, max_length=160, max_lora_rank=16, **settings)


def asked(case: str, folders: dict[str, Path]) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, each with every adapter and without."""
    pairs = [(prompt, n) for prompt in golden(case)["prompts"][:2] for n in (None, *folders)]
    return [prompt for prompt, _ in pairs], [replace(GREEDY, adapter=name) for _, name in pairs]


def test_a_family_answers_as_with_the_adapter_merged(
    gpu: devices.Device, case: str, two: dict[str, Path]
) -> None:
    llm = serving_case(case, two, dtype="float32")
    found = dict(zip((None, *two), llm.generate(*asked(case, two)), strict=False))
    for name, output in found.items():
        merging = {} if name is None else {"lora_path": str(two[name])}
        merged = serving_case(case, {}, dtype="float32", **merging)
        assert_near(output, *merged.generate(golden(case)["prompts"][:1], GREEDY))
    assert len({output.token_ids for output in found.values()}) == len(found)


def test_a_familys_mixed_batch_gives_each_what_it_has_alone(
    gpu: devices.Device, case: str, two: dict[str, Path]
) -> None:
    settings = {"dtype": "bfloat16", "batch_invariant": True, "prefix_caching": False}
    # Prompts stand beside what is decoded, but where experts hand their sums on within a call.
    has_experts = case.startswith("deepseek") or "moe" in case
    llm = serving_case(case, two, batch_size=8 if has_experts else 4, **settings)
    prompts, params = asked(case, two)
    lengths = [12, 3, 9, 12, 5, 12]
    params = [replace(e, max_new_tokens=n) for e, n in zip(params, lengths, strict=True)]
    together = llm.generate(prompts, params)
    for prompt, each, output in zip(prompts, params, together, strict=True):
        (alone,) = llm.generate([prompt], each)
        assert steps(alone) == steps(output)


def test_a_family_without_adapters_has_the_bits_of_one_that_takes_none(
    gpu: devices.Device, case: str, two: dict[str, Path]
) -> None:
    llm, bare = (serving_case(case, each, dtype="bfloat16") for each in (two, {}))
    prompts = golden(case)["prompts"][:2]
    for prompt in prompts:
        llm.generate([prompt], replace(GREEDY, adapter="5"))
    for prompt in prompts:
        (ours,), (theirs,) = (each.generate([prompt], GREEDY) for each in (llm, bare))
        assert steps(ours) == steps(theirs)


def test_a_familys_program_answers_as_the_dynamic_model(
    gpu: devices.Device, case: str, two: dict[str, Path], tmp_path: Path
) -> None:
    settings = {"dtype": "float32", "batch_invariant": True}
    dynamic = serving_case(case, two, **settings)
    folder = tmp_path / "static"
    export_model(dynamic.config.changed(lora_modules=()), folder, enable_lora=True)
    static = serving_case(folder, two, mode="static", **settings)
    # Not bit for bit: a program cuts layers, and MLPs behind ChatGLM's attention, into other calls.
    # Twice: the second time steps are replayed, and blocks of prompts cached.
    for _ in range(2):
        found, wanted = (each.generate(*asked(case, two)) for each in (static, dynamic))
        for output, other in zip(found, wanted, strict=True):
            assert_near(output, other)


def test_drafts_change_no_answer_of_a_family(
    gpu: devices.Device, case: str, two: dict[str, Path]
) -> None:
    settings = {"dtype": "bfloat16", "batch_invariant": True}
    prompts, params = asked(case, two)
    params = [replace(each, logprobs=None) for each in params]
    wanted = serving_case(case, two, **settings).generate(prompts, params)
    drafts = {"speculate_method": "inference_with_reference", "speculate_max_ngram_size": 2}
    llm = serving_case(case, two, speculate_max_draft_token_num=4, **drafts, **settings)
    draft_always(llm)
    found = llm.generate(prompts, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
