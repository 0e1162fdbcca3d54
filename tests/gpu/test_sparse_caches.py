"""Layers without attention on the GPU: answers as NumPy has them, layers as their plain twins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predict import LLM
from predict.device import devices
from predict.loading.build import fold_norms
from predict.nn.decoder import Layer
from predict.ops import compiled as ops
from predict.ops import plain as reference
from tests.support.adapters import write_adapter
from tests.support.gpu_engines import FORMS, SETTINGS, runner_of
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
from tests.support.gpu_products import DISTANCE, skip_unless_product
from tests.support.schemes import logits_of, relative_error
from tests.support.sparse_caches import (
    GREEDY,
    NETWORKS,
    PROMPTS,
    check_answers,
    check_logits,
    config,
    tokens,
    write_network,
)
from tests.support.tiny import CONFIG
from tests.support.tolerances import BLOCK_ROUNDINGS

pytestmark = pytest.mark.usefixtures("sparse_caches")
SHAPE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("network", NETWORKS)
def test_logits_and_tokens_are_numpys(
    gpu: devices.Device, network: str, form: str, tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", network)
    llm = FORMS[form](LLM(config(folder, **SETTINGS)))
    for _ in range(2):
        check_answers(folder, tokens(llm))
    assert llm.stats().num_prefix_hit_tokens > 0
    assert bool(runner_of(llm).graphs) == (form != "eager")
    check_logits(folder, llm)


@pytest.mark.parametrize("name", ["weight_only_int8", "weight_only_int4"])
@pytest.mark.parametrize("network", ["AM", "MA"])
def test_quantized_layers_are_near_those_of_plain_paddle(
    gpu: devices.Device, network: str, name: str, tmp_path: Path
) -> None:
    skip_unless_product(name, -1)
    folder = write_network(tmp_path / "model", network, **SHAPE)
    settings = {"quant_type": name}
    got = logits_of(folder, dtype="bfloat16", **SETTINGS, **settings)
    assert relative_error(got, logits_of(folder, **settings)) < DISTANCE["bfloat16"]


def test_adapters_reach_the_rows_behind_the_last_attention(
    gpu: devices.Device, tmp_path: Path
) -> None:
    folder = write_network(tmp_path / "model", "MAMM")
    shape = CONFIG | {"num_hidden_layers": 4}
    targets = ("gate_proj", "up_proj", "down_proj")
    paths = [write_adapter(tmp_path / name, shape, 8, ord(name), targets) for name in "ab"]
    modules = tuple(f"{path.name}={path}" for path in paths)
    serving = LLM(config(folder, lora_modules=modules, **{**SETTINGS, "batch_size": 4}))
    names = ["a", None, "b", "a"]
    params = [replace(GREEDY, adapter=name) for name in names]
    outputs = serving.generate(PROMPTS, params)
    for prompt, name, output in zip(PROMPTS, names, outputs, strict=True):
        merged = LLM(
            config(folder, lora_path=None if name is None else tmp_path / name, **SETTINGS)
        )
        assert merged.generate([prompt], GREEDY)[0].token_ids == output.token_ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("make", [decode_spans, prefill_spans])
def test_mlps_behind_mlps_equal_their_plain_twins(
    gpu: devices.Device, dtype: str, folded: bool, make: Any
) -> None:
    operands, heads = Operands(gpu, dtype), Heads(8, 2, 64)
    step = Step(operands, [span for span in make(32) if span.new], heads, 32)
    wholes = [operands.layer(256, 320, heads, True, False) for _ in range(3)]
    plain: list[Layer] = [wholes[0], wholes[1][1:], wholes[2][1:]]
    layers: list[Layer] = [operands.on_gpu(layer) for layer in plain]
    if folded:
        layers = [fold_norms(layer, ops) for layer in layers]
    check_layers(step, heads, plain, layers, 256, 4 * BLOCK_ROUNDINGS)


def test_first_layers_without_a_cache_run_alone(gpu: devices.Device) -> None:
    operands, heads = Operands(gpu, "float32"), Heads(8, 2, 64)
    plain = operands.layer(256, 320, heads, False, False)[1:]
    step = Step(operands, [Span(0, 9)], heads, 32)
    rope, hidden = operands.ropes(heads), operands.tensor(9, 256)
    bound = ops.BoundLayers([operands.on_gpu(plain)], [()], rope.device)
    with operands.on_cpu():
        wanted, _ = reference.layers(hidden.plain, [plain], [()], rope.plain, step.plain)
    compare(bound(hidden.device, step.device), wanted, "float32", BLOCK_ROUNDINGS)
