"""Engines on a GPU, in every form in which a model runs there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams
from predict.engine.request_state import Request
from predict.engine.runner.gpu import GpuRunner
from tests.support.paths import DEMO

SETTINGS: dict[str, Any] = {"device": "gpu", "inference_model": True, "attention": "append"}


def runner_of(llm: LLM) -> GpuRunner:
    runner = llm.engine.runner
    assert isinstance(runner, GpuRunner)
    return runner


def without_graphs(llm: LLM) -> LLM:
    runner_of(llm).graphs.pool = None
    return llm


def exported(llm: LLM) -> LLM:
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
        "dtype": "float32",
        "max_length": 256,
        "block_size": 16,
        "batch_size": 4,
        **SETTINGS,
        **changes,
    }
    return EngineConfig(**values)


def met_traffic(
    llm: LLM,
    prompts: list[list[int]],
    wanted: list[list[int]],
    num_requests: int,
    most_at_once: int,
    seed: int,
) -> list[Request]:
    """Requests that came and were aborted at random, all at an end.

    Asserts that their texts begin those that are wanted, and that no block is left in use.
    """
    engine, generator = llm.engine, np.random.default_rng(seed)
    requests: list[tuple[Request, int]] = []
    finished, alive = list[Request](), set[int]()
    while len(requests) < num_requests or engine.scheduler.has_unfinished():
        for _ in range(int(generator.integers(0, most_at_once + 1))):
            if len(requests) == num_requests:
                break
            which = int(generator.integers(len(prompts)))
            length = int(generator.integers(1, len(wanted[which]) + 1))
            params = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True)
            request = Request(len(requests), prompts[which], params)
            engine.add(request)
            alive.add(request.request_id)
            requests.append((request, which))
        if alive and generator.random() < 0.04:
            victim = sorted(alive)[int(generator.integers(len(alive)))]
            assert engine.abort(victim) is requests[victim][0]
            alive.discard(victim)
        _, ended = engine.step()
        finished += ended
        alive -= {request.request_id for request in ended}
    while engine.step()[0] is not None:  # steps that still ran for aborted requests
        pass
    assert engine.scheduler.block_manager.num_used_blocks == 0
    assert not alive
    aborted = [request for request, _ in requests if request.finish_reason == "abort"]
    assert len(finished) + len(aborted) == num_requests
    for request, which in requests:
        length = request.num_output_tokens
        assert request.output_token_ids == wanted[which][:length], request.request_id
        if request.finish_reason != "abort":
            assert length == request.sampling_params.max_new_tokens
    return [request for request, _ in requests]
