"""Engines that serve adapters, and what their requests get."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predict.llm import LLM
from predict.request import RequestOutput, SamplingParams
from tests.support.adapters import SEVEN

NAMES: tuple[str | None, ...] = (None, *SEVEN)
PROMPTS = [[5, 9, 11, 30], [5, 9, 11, 30, 7, 8], list(range(20, 45)), [77]]


def settings(folders: Mapping[str, Path], **changes: Any) -> dict[str, Any]:
    """Of an engine with these adapters from the start."""
    return {
        "dtype": "float32",
        "inference_model": True,
        "attention": "append",
        "lora_modules": tuple(f"{name}={path}" for name, path in folders.items()),
        "max_lora_rank": 64,
        "batch_size": 8,
        **changes,
    }


def steps(output: RequestOutput) -> tuple[tuple[int, ...], list[dict[int, float]]]:
    """An answer's tokens, and the logprobs of the likeliest ones at each place."""
    (answer,) = output.outputs
    found = [{token: e.logprob for token, e in step.items()} for step in answer.logprobs or ()]
    return answer.token_ids, found


def generate(llm: LLM, asked: list[tuple[Any, SamplingParams]]) -> list[RequestOutput]:
    """All answers; nothing is left behind."""
    found = llm.generate([prompt for prompt, _ in asked], [each for _, each in asked])
    llm.engine.scheduler.check()
    assert llm.stats().num_used_blocks == 0
    if llm.addons.adapters is not None:
        llm.addons.adapters.pool.check({})
    return found


def ask(
    llm: LLM, asked: list[tuple[Any, SamplingParams]]
) -> list[tuple[tuple[int, ...], list[dict[int, float]]]]:
    """Tokens and logprobs of each answer."""
    return list(map(steps, generate(llm, asked)))
