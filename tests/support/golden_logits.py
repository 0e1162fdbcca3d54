"""Logits of a golden's prompts, as an engine's runner makes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from predict import LLM, SamplingParams
from predict.engine.batch import placed, span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from tests.support.golden import GOLDEN, golden, step_logits

LOGIT_TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order
BLOCK_SIZE = 32


def logits_and_wanted(
    llm: LLM, case: str, which: slice = slice(None)
) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
    """Of all prompts in one step: the last rows, and the tail of the prompt that has one."""
    expected = np.load(GOLDEN / case / "golden.npz")
    prompts = golden(case)["prompts"][which]
    width = llm.config.max_length // BLOCK_SIZE
    spans, start = [], 0
    for number, prompt in enumerate(prompts):
        request = Request(number, prompt, SamplingParams())
        blocks = list(range(start, start + width))
        spans.append(ScheduledSpan(request, len(prompt), 0, blocks, True))
        start += width
    placing = llm.engine.scheduler.config.placing
    inputs = span_inputs(spans, BLOCK_SIZE)
    inputs = inputs if placing is None else placed(inputs, spans, placing)
    wanted, rows = expected["last_logits"][which], None
    if prompts[-1] == golden(case)["prompts"][golden(case)["tail_prompt"]]:
        end, num_tail = inputs.cu_seqlens_q[-1], len(expected["tail_logits"])
        rows = np.concatenate([inputs.logit_indices, np.arange(end - num_tail, end)])
        wanted = np.concatenate([wanted, expected["tail_logits"]])
    return step_logits(llm, inputs, rows), wanted


def check_logits(llm: LLM, case: str, which: slice = slice(None)) -> None:
    """Raises AssertionError unless they are the golden's."""
    logits, wanted = logits_and_wanted(llm, case, which)
    tolerance = LOGIT_TOLERANCE * np.abs(wanted).max()
    np.testing.assert_allclose(logits, wanted, atol=tolerance, rtol=0)
