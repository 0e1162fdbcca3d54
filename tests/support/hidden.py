"""Hidden states that transformers found on golden checkpoints, and steps that ask for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from predict import SamplingParams
from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.nn.inputs import StepInputs
from tests.support.golden import GOLDEN, golden

WANTED: Any = np.load(GOLDEN / "embeddings.npz")  # see tests/golden/make_embeddings.py
CASES = sorted({name.partition("/")[0] for name in WANTED})
TAPS = ("norm", "layers.0")
BLOCK_SIZE = 32


def step_of(prompts: list[list[int]], first: int = 0, end: int | None = None) -> StepInputs:
    """Tokens `first` to `end` of prompts; logits behind the last ones, where they are there."""
    spans = []
    for number, prompt in enumerate(prompts):
        tokens, blocks = prompt[first:end], list(range(4 * number, 4 * number + 4))
        start, request = range(len(prompt))[first], Request(number, prompt, SamplingParams())
        spans.append(ScheduledSpan(request, len(tokens), start, blocks, end is None))
    return span_inputs(spans, BLOCK_SIZE)


def check_hidden(case: str, outputs: Any) -> None:
    """Of a step of the last golden prompt."""
    assert set(outputs.hidden) == set(TAPS)
    hidden = {tap: tensor.cpu().numpy() for tap, tensor in outputs.hidden.items()}
    np.testing.assert_allclose(hidden["layers.0"], WANTED[f"{case}/layers.0"], atol=1e-4, rtol=0)
    np.testing.assert_allclose(hidden["norm"][-1], WANTED[f"{case}/last"][-1], atol=1e-4, rtol=0)


def check_embeddings(case: str, llm: Any) -> None:
    """Of all golden prompts of at most `max_length` tokens, with each pooling."""
    most = llm.config.max_length
    prompts = [prompt for prompt in golden(case)["prompts"] if len(prompt) <= most]
    which = [len(prompt) <= most for prompt in golden(case)["prompts"]]
    for pooling in ("last", "mean"):
        wanted = WANTED[f"{case}/{pooling}"][which]
        found = llm.embed(prompts, pooling, normalize=False)
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
        wanted = wanted / np.linalg.norm(wanted, axis=1, keepdims=True)
        np.testing.assert_allclose(llm.embed(prompts, pooling), wanted, atol=1e-4, rtol=0)
    assert llm.stats().num_used_blocks == 0
