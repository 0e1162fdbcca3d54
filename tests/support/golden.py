"""The golden checkpoints of Hugging Face transformers, and runs of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from predict import LLM, EngineConfig, SamplingParams
from predict.nn.inputs import RowKind, StepInputs
from tests.support.paths import ROOT

GOLDEN = ROOT / "tests" / "golden"
# Checkpoints of codes: products of theirs round activations too (tests/loading/test_float8.py).
CODED = frozenset({"deepseek_v3_fp8"})
CASES = sorted({path.parent.name for path in GOLDEN.glob("*/golden.json")} - CODED)
# Of families with several, one case that runs every way there is; the others run dynamically.
EVERY_WAY = frozenset(
    {
        *("baichuan_2_13b", "baichuan_7b", "bloom_7b", "chatglm_2_6b", "chatglm_6b", "cohere_35b"),
        *("cohere_qk_norm", "deepseek_v2_lite", "deepseek_v3", "ernie4_5_0_3b", "ernie4_5_moe_21b"),
        *("ernie_3_5_se", "falcon_40b", "falcon_rw", "gemma2_9b", "gemma3_4b", "gemma3_text_1b"),
        *("gemma_2b", "glm4_9b", "glm4_moe_355b", "glm_9b", "gpt2_small", "gpt_paddlenlp"),
        *("gpt_neox_pythia", "gpt_oss_20b", "granite_8b", "internlm2_7b", "minicpm_2b"),
        *("mistral3_24b", "mixtral_8x7b", "olmo2_7b", "olmoe_7b", "opt_350m", "phi3_mini", "phi_2"),
        *("qwen2_moe_a2_7b", "qwen3_moe_30b", "qwen_7b", "smollm3_3b", "stablelm_12b", "qwen_long"),
        *("stablelm_3b", "starcoder2_window"),
        *("exaone4_32b", "glm4_moe_lite_30b", "minimax_m2_230b", "ministral3_8b", "mistral3_3b"),
        *("granitemoe_3b", "hunyuan_7b", "olmo3_7b", "phimoe_42b", "seed_oss_36b"),
    }
)
FIRST_FAMILIES = frozenset(
    case for case in CASES if case.startswith(("llama", "mistral", "qwen2", "qwen3"))
)
# Tracing plain operators takes seconds for each case: those that differ most are traced.
TRACED = frozenset(
    {
        *("bloom_7b", "chatglm_2_6b", "chatglm_6b", "gemma2_9b", "gpt2_small", "olmo2_7b"),
        *("glm4_moe_355b", "gpt_oss_20b", "opt_350m", "qwen_7b", "qwen_long"),
        *("llama_biases", "llama_gqa", "llama_rope_yarn", "mistral_window", "qwen2", "qwen3_tied"),
    }
)


def step_logits(llm: LLM, inputs: StepInputs, rows: npt.NDArray[np.int32] | None = None) -> Any:
    """The float32 logits [L, V] of a step by itself. rows: of these tokens in place of its own."""
    if rows is not None:
        max_lens = np.array((*inputs.max_lens[:4], RowKind.LISTED), np.int32)
        inputs = inputs._replace(logit_indices=rows, max_lens=max_lens)
    logits = llm.engine.runner.run(inputs).logits
    assert logits is not None
    return logits.cpu().numpy()


def _rows(reference: frozenset[str], fused: frozenset[str]) -> list[Any]:
    """Cases with operators; slow where they are not among these."""
    quick = {"reference": reference, "fused": fused}
    return [
        pytest.param(case, name, marks=() if case in quick[name] else pytest.mark.slow)
        for case in CASES
        for name in quick
    ]


def crossed(cases: Sequence[str], others: Sequence[Any]) -> list[Any]:
    """Each case with each other value on compiled operators; on plain ones each value once."""
    rows = [(case, other, "fused") for case in cases for other in others]
    pairs = zip(range(max(len(cases), len(others))), cycle(cases), cycle(others), strict=False)
    return [*rows, *((case, other, "reference") for _, case, other in pairs)]


GREEDY = _rows(EVERY_WAY | TRACED, frozenset(CASES))
ON_GPU = [
    pytest.param(case, marks=() if case in FIRST_FAMILIES | TRACED else pytest.mark.slow)
    for case in CASES
]
EXPORTS = [
    row
    for row in _rows(TRACED, EVERY_WAY | FIRST_FAMILIES)
    if row.values[1] == "fused" or row.values[0] in TRACED
]
MAX_LENGTH = 160  # tokens; the longest golden prompt and its output fit
# Of cases whose prompts need engines of several lengths: max_length and the prompts.
RUNS: dict[str, tuple[tuple[int, slice], ...]] = {
    **dict.fromkeys(
        ("phi3_longrope", "phi3_4_mini"), ((64, slice(0, 3)), (MAX_LENGTH, slice(3, 5)))
    ),
    # They have no positions beyond.
    **dict.fromkeys(("gpt2_small", "gpt_paddlenlp", "gpt_paddlenlp_fused"), ((144, slice(None)),)),
}

OPERATORS = {"reference": {"inference_model": False}, "fused": {"inference_model": True}}
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
    values: dict[str, Any] = {"dtype": "float32", "max_length": MAX_LENGTH, "block_size": 32}
    values |= {"inference_model": False, **changes}
    return EngineConfig(model_name_or_path=str(GOLDEN / case), **values)


def greedy(llm: LLM, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return [list(output.token_ids) for output in llm.generate(prompts, params)]


def runs(case: str) -> tuple[tuple[int, slice], ...]:
    return RUNS.get(case, ((MAX_LENGTH, slice(None)),))


def check_greedy(llm: LLM, case: str, which: slice = slice(None)) -> None:
    prompts, answers = golden(case)["prompts"][which], golden(case)["greedy"][which]
    assert greedy(llm, prompts, len(answers[0])) == answers
    assert llm.stats().num_used_blocks == 0
