"""Whole answers on the GPU: equal to transformers' goldens in float32, with and without graphs."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict import device as devices
from predict.engine.gpu_runner import GpuRunner
from predict.errors import UserError
from tests.test_golden import (
    CASES,
    COMPOSITIONS,
    DEMO,
    GOLDEN,
    check_greedy,
    config,
    golden,
    greedy,
)

SETTINGS = {"device": "gpu", "inference_model": True, "attention": "append"}


def runner_of(llm: LLM) -> GpuRunner:
    runner = llm.engine.runner
    assert isinstance(runner, GpuRunner)
    return runner


def without_graphs(llm: LLM) -> LLM:
    runner_of(llm).pool = None
    return llm


def exported(llm: LLM) -> LLM:
    """The static model of the same settings."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        export_model(llm.config, directory)
        settings = dataclasses.replace(llm.config, model_name_or_path=str(directory), mode="static")
        return LLM(settings)


FORMS: dict[str, Callable[[LLM], LLM]] = {
    "graph": lambda llm: llm,
    "eager": without_graphs,
    "static": exported,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_greedy_text_equals_transformers(gpu: devices.Device, case: str, form: str) -> None:
    llm = FORMS[form](LLM(config(case, batch_size=3, **SETTINGS)))
    check_greedy(llm, case)
    assert bool(runner_of(llm).graphs) == (form != "eager")


@pytest.mark.parametrize("composition", list(COMPOSITIONS))
@pytest.mark.parametrize("case", ["llama_gqa", "qwen2", "mistral_window"])
def test_batch_composition_changes_nothing(
    gpu: devices.Device, case: str, composition: str
) -> None:
    settings: dict[str, Any] = {"block_size": 32, **SETTINGS, **COMPOSITIONS[composition]}
    check_greedy(LLM(config(case, **settings)), case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_graphs_equal_eager_steps(gpu: devices.Device, dtype: str) -> None:
    expected = golden("llama_gqa")
    answers = [
        greedy(
            change(LLM(config("llama_gqa", batch_size=4, dtype=dtype, **SETTINGS))),
            expected["prompts"],
            8,
        )
        for change in FORMS.values()
    ]
    assert answers[0] == answers[1] == answers[2]
    first = [a[0] == e[0] for a, e in zip(answers[0], expected["greedy"], strict=True)]
    assert sum(first) >= len(first) - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_model_says_what_transformers_says(gpu: devices.Device, dtype: str) -> None:
    expected = json.loads((GOLDEN / "demo_model.json").read_text())
    llm = LLM(config(DEMO, batch_size=4, max_length=256, dtype=dtype, **SETTINGS))
    params = SamplingParams(max_new_tokens=expected["num_new_tokens"], temperature=0.0)
    outputs = llm.generate([case["prompt"] for case in expected["cases"]], params)
    for case, output in zip(expected["cases"], outputs, strict=True):
        if dtype == "float32":
            assert list(output.token_ids) == case["greedy"]
        else:
            assert list(output.token_ids)[:4] == case["greedy"][:4]


def test_sampling_repeats_with_its_seed(gpu: devices.Device) -> None:
    llm = LLM(config("llama_gqa", batch_size=3, **SETTINGS))
    params = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=20, top_p=0.9, seed=7)
    prompts = golden("llama_gqa")["prompts"][:3]
    first, second = (
        [list(output.token_ids) for output in llm.generate(prompts, params)] for _ in range(2)
    )
    assert first == second


def test_plain_operators_are_refused(gpu: devices.Device) -> None:
    with pytest.raises(UserError, match="--append_attn"):
        LLM(config("llama_gqa", device="gpu"))
