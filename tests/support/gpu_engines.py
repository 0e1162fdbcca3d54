"""Engines on a GPU, in every form in which a model runs there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from export.export_model import export_model
from predict import LLM, EngineConfig
from predict.engine.gpu_runner import GpuRunner
from tests.support.paths import DEMO

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
        settings = llm.config.changed(model_name_or_path=str(directory), mode="static")
        return LLM(settings)


FORMS: dict[str, Callable[[LLM], LLM]] = {
    "graph": lambda llm: llm,
    "eager": without_graphs,
    "static": exported,
}


def answer_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model_name_or_path": str(DEMO),
        "max_length": 256,
        "block_size": 16,
        "batch_size": 4,
        **SETTINGS,
        **changes,
    }
    return EngineConfig(**values)
