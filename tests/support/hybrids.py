"""The golden checkpoints of models with a state per request."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from predict import LLM, EngineConfig, SamplingParams
from predict.engine.batch import span_inputs, stated
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from tests.support.paths import ROOT

FOLDER = ROOT / "tests" / "golden_hybrids"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text())
LOGITS: Any = np.load(FOLDER / "golden.npz")  # see tests/golden_hybrids/make.py
PROMPTS: list[list[int]] = GOLDEN["prompts"]
CASES = [name for name in GOLDEN if name != "prompts"]
BLOCK_SIZE, MAX_LENGTH = 32, 256
GREEDY = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)


def config(case: Any, **changes: Any) -> EngineConfig:
    values: dict[str, Any] = {"dtype": "float32", "max_length": MAX_LENGTH, "batch_size": 5}
    values |= {"block_size": BLOCK_SIZE, "attention": "append", **changes}
    return EngineConfig(model_name_or_path=str(FOLDER / case), **values)


def greedy(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    """The answers; afterwards nothing is held."""
    found = [list(output.token_ids) for output in llm.generate(prompts, params)]
    llm.engine.scheduler.check()
    assert llm.stats().num_used_blocks == 0
    return found


def last_logits(llm: LLM, prompts: list[list[int]]) -> Any:
    """[prompts, V] behind each prompt, from one step that keeps no state."""
    spans, first = [], 0
    for number, prompt in enumerate(prompts):
        blocks = list(range(first, first := first + -(-len(prompt) // BLOCK_SIZE)))
        request = Request(number, prompt, SamplingParams())
        spans.append(ScheduledSpan(request, len(prompt), 0, blocks, True))
    logits = llm.engine.runner.run(stated(span_inputs(spans, BLOCK_SIZE), spans)).logits
    assert logits is not None
    return logits.numpy()
