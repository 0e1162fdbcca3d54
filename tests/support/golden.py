"""The golden checkpoints of Hugging Face transformers, and runs of them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from predict import LLM, EngineConfig, SamplingParams
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "golden"
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}  # by model_type: those that the tests run
CASES = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/golden.json")
    if json.loads(path.with_name("config.json").read_text())["model_type"] in FAMILIES
)
MAX_LENGTH = 160  # tokens; the longest golden prompt and its output fit

OPERATORS = {
    "reference": {},
    "fused": {"inference_model": True},
}
# How the same requests may be cut into steps and blocks. Every row must give the same tokens.
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "one by one": {"batch_size": 1},
    "batch of 2, reserved": {"batch_size": 2, "block_size": 16},
    "batch of 3, block": {"batch_size": 3, "block_size": 64, "attention": "block"},
    "batch of 16": {"batch_size": 16, "block_size": 16, "attention": "append"},
    "tiny chunks": {"batch_size": 5, "attention": "append", "max_num_batched_tokens": 7},
    "whole prompts": {"batch_size": 4, "attention": "append", "chunked_prefill": False},
}


@functools.cache
def golden(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "golden.json").read_text())


def config(case: str | Path, **changes: Any) -> EngineConfig:
    values = {"max_length": MAX_LENGTH, "block_size": 32, **changes}
    return EngineConfig(model_name_or_path=str(GOLDEN / case), **values)


def greedy(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(prompts, params)]


def check_greedy(llm: LLM, case: str) -> None:
    expected = golden(case)
    assert greedy(llm, expected["prompts"], len(expected["greedy"][0])) == expected["greedy"]
    assert llm.stats().num_used_blocks == 0
