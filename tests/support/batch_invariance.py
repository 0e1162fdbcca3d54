"""Ways to run the same requests, which must give the same answers to the last bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from predict import LLM, EngineConfig, SamplingParams
from tests.support.drafts import draft_always, drafting, heldout

# How the same requests may be run. The prompts have 40 tokens and more.
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"batch_size": 1},
    "together": {"batch_size": 12},
    "in parts": {"batch_size": 12, "max_num_batched_tokens": 24},
    "by turns": {"batch_size": 5, "attention": "block"},
    "after each other's beginnings": {"batch_size": 3, "prefix_caching": True, "block_size": 16},
    "with copied drafts": {"batch_size": 4, **drafting("inference_with_reference", 9)},
    "with drafts of lookahead": {"batch_size": 7, **drafting("lookahead", 4)},
}
Answer = tuple[tuple[int, ...], list[dict[int, float]]]


def answers(
    directory: Path, settings: Mapping[str, Any], count: int, length: int = 16
) -> list[Answer]:
    """Token ids, and logprobs of the likeliest tokens at each place."""
    values: dict[str, Any] = {
        "max_length": 256,
        "attention": "append",
        "inference_model": True,
        "prefix_caching": False,
    }
    llm = LLM(EngineConfig(model_name_or_path=str(directory), **{**values, **settings}))
    draft_always(llm)
    params = SamplingParams(max_new_tokens=length, temperature=0.0, ignore_eos=True, logprobs=3)
    found = []
    for output in llm.generate(heldout(count), params):
        table = output.outputs[0].logprobs
        assert table is not None
        likeliest = [{token: one.logprob for token, one in place.items()} for place in table]
        found.append((output.token_ids, likeliest))
    assert llm.stats().num_used_blocks == 0
    if llm.engine.speculation.policy is not None:
        assert llm.stats().num_accepted_draft_tokens > 0
    return found


def check_ways(directory: Path, settings: Mapping[str, Any], count: int) -> None:
    """All of WAYS give what the first one gives."""
    first, *others = WAYS
    wanted = answers(directory, {**settings, **WAYS[first]}, count)
    for way in others:
        assert answers(directory, {**settings, **WAYS[way]}, count) == wanted, way
