"""Requests that make a step fail on a GPU, where steps run ahead: they end, the others do not."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from predict.errors import EngineError
from tests.support.drafts import Generous
from tests.support.golden import config
from tests.support.gpu_engines import SETTINGS as ON_GPU
from tests.support.paths import DEMO

PLACE = 5
SETTINGS: dict[str, Any] = {**ON_GPU, "batch_size": 6, "block_size": 16, "batch_invariant": True}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {},
    "n-grams": {"speculate_method": "inference_with_reference"},
    "draft model": {"speculate_method": "draft_model", "draft_model_name_or_path": str(DEMO)},
}
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.95},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0, "frequency_penalty": 0.3, "logprobs": 0},
]
# What no check would let through -> the stage in which it fails.
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "an operator's input": ({"top_k": 2**31}, "stage sample"),
    "another kind of value": ({"min_p": "much"}, "stage sample"),
    "a penalty": ({"presence_penalty": "much"}, "stage adjust"),
    "rules": ({"logit_bias": {11: "much"}}, "stage adjust"),
    "logprobs": ({"logprobs": "many"}, "stage logprobs"),
    "a NaN": ({"logit_bias": {11: math.nan}}, "no finite largest logit"),
}


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    generator = np.random.default_rng(3)
    prompts, params = [], []
    for index in range(16):
        words = generator.integers(3, 500, 4).tolist()
        prompts.append((words * 5)[: 4 + index])
        values = PARAMS[index % len(PARAMS)]
        params.append(
            SamplingParams(max_new_tokens=9 + index % 7, seed=index, ignore_eos=True, **values)
        )
    return prompts, params


def results(outputs: list[Any]) -> list[Any]:
    return [(each.token_ids, each.text, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("drafts", DRAFTS)
def test_requests_that_fail_end_alone(gpu: devices.Device, drafts: str, graphs: bool) -> None:
    llm = LLM(config(DEMO, **SETTINGS, **DRAFTS[drafts]))
    runner: Any = llm.engine.runner
    if not graphs:
        runner.graphs.pool = None
    if llm.engine.speculation.proposer is not None:
        looks_up = llm.engine.speculation.proposer.looks_up
        llm.engine.speculation.policy = Generous(3, 24, looks_up)
    prompts, params = requests()
    expected = results(llm.generate(prompts, params))
    scheduler = llm.engine.scheduler
    for name, (wrong, said) in FAULTS.items():
        bad = SamplingParams(temperature=1.0, max_new_tokens=8, seed=1, ignore_eos=True)
        for field, value in wrong.items():
            object.__setattr__(bad, field, value)
        outputs = llm.generate(
            [*prompts[:PLACE], [7, 8, 9], *prompts[PLACE:]], [*params[:PLACE], bad, *params[PLACE:]]
        )
        output = outputs.pop(PLACE)
        assert output.finish_reason == "error", name
        assert said in (output.outputs[0].error or ""), name
        assert results(outputs) == expected, name
        scheduler.check()
        assert scheduler.block_manager.num_used_blocks == 0
    if drafts != "none":
        assert llm.stats().num_draft_tokens > 0
    assert not graphs or runner.num_recorded > 0


def test_a_device_on_which_nothing_runs_ends_all(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(config(DEMO, **SETTINGS))
    prompts, params = requests()
    expected = results(llm.generate(prompts, params))
    runner: Any = llm.engine.runner
    launch, left = runner.launch, [6]

    def broken(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("an illegal memory access was encountered")
        return launch(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "launch", broken)
        with pytest.raises(EngineError, match="illegal memory access"):
            llm.generate(prompts, params)
    assert llm.stats().num_used_blocks == 0
    assert results(llm.generate(prompts, params)) == expected
