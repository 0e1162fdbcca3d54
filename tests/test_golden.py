"""Greedy text and logits equal HF transformers' (tests/golden), however they are computed.

Operators: plain Paddle ("reference"), compiled ("fused"), and the exported program ("static").
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.device import library
from predict.device.place import to_float32
from predict.engine.batch import span_inputs
from predict.engine.request_state import Request
from predict.engine.scheduled import ScheduledSpan
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from tests.golden.numpy_models import qwen
from tests.support.drafts import draft_always
from tests.support.golden import (
    COMPOSITIONS,
    EVERY_WAY,
    EXPORTS,
    GOLDEN,
    GREEDY,
    MAX_LENGTH,
    check_greedy,
    config,
    crossed,
    golden,
    greedy,
    runs,
    step_logits,
)
from tests.support.golden_logits import BLOCK_SIZE, LOGIT_TOLERANCE, check_logits
from tests.support.paths import DEMO


def check_both(source: str | Path, case: str, which: slice, **changes: Any) -> None:
    """The logits of prompts, and the text behind them."""
    blocks = 8 * changes["max_length"] // BLOCK_SIZE
    llm = LLM(config(source, batch_size=3, num_cache_blocks=blocks, **changes))
    check_logits(llm, case, which)
    check_greedy(llm, case, which)


@pytest.mark.parametrize(("case", "operators"), GREEDY, indirect=["operators"])
def test_text_and_logits_equal_transformers(case: str, operators: dict[str, Any]) -> None:
    for max_length, which in runs(case):
        check_both(case, case, which, max_length=max_length, attention="append", **operators)


@pytest.mark.parametrize("case", sorted(EVERY_WAY))
def test_block_attention_gives_the_same_text_and_logits(
    case: str, compiled: library.Library
) -> None:
    settings = {"attention": "block", "inference_model": True}
    for max_length, which in runs(case):
        check_both(case, case, which, max_length=max_length, **settings)


@pytest.mark.parametrize("logn", [False, True])
def test_the_first_qwen_reads_on_past_its_length(
    logn: bool, operators: dict[str, Any], tmp_path: Path
) -> None:
    """Queries beyond seq_length get the logarithm of their length, with the base as it is."""
    folder = Path(shutil.copytree(GOLDEN / "qwen_long", tmp_path / "qwen"))
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"use_dynamic_ntk": False, "use_logn_attn": logn}
    path.write_text(json.dumps(values))
    checkpoint = Checkpoint(folder)
    weights = {
        name: to_float32(checkpoint.read(name)).astype(np.float64) for name in checkpoint.tensors
    }
    prompt = golden("qwen_long")["prompts"][-1]
    wanted = qwen(values, weights, prompt, len(prompt))[-1]
    llm = LLM(config(folder, batch_size=1, **operators))
    blocks = list(range(MAX_LENGTH // 32))
    span = ScheduledSpan(Request(0, prompt, SamplingParams()), len(prompt), 0, blocks, True)
    logits = step_logits(llm, span_inputs([span], 32))[0]
    np.testing.assert_allclose(logits, wanted, atol=LOGIT_TOLERANCE * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize(
    ("case", "composition", "operators"),
    crossed(
        ["llama_gqa", "qwen2", "mistral_window", "bloom_7b", "qwen_long", "deepseek_v3"],
        list(COMPOSITIONS),
    ),
    indirect=["operators"],
)
def test_batch_composition_changes_nothing(
    case: str, composition: str, operators: dict[str, Any]
) -> None:
    llm = LLM(config(case, **{"block_size": 32, **COMPOSITIONS[composition]}, **operators))
    check_greedy(llm, case)


@pytest.mark.parametrize("composition", [name for name in COMPOSITIONS if name != "tiny chunks"])
def test_prompts_that_see_themselves_both_ways_run_whole_beside_others(
    composition: str, operators: dict[str, Any]
) -> None:
    case = "chatglm_6b"
    llm = LLM(config(case, **{"block_size": 32, **COMPOSITIONS[composition]}, **operators))
    check_greedy(llm, case)
    check_greedy(llm, case)
    assert llm.stats().num_prefix_hit_tokens == 0


def test_prompts_that_see_themselves_both_ways_must_fit_a_step(compiled: library.Library) -> None:
    prompts = golden("chatglm_6b")["prompts"]
    llm = LLM(config("chatglm_6b", batch_size=2, max_num_batched_tokens=102))
    with pytest.raises(UserError, match=r"103 prompt tokens are more than a step takes .*1 to 102"):
        greedy(llm, prompts, 4)
    assert llm.stats().num_steps == 0
    roomy = LLM(config("chatglm_6b", max_length=700))  # without the flag there is always room
    assert roomy.engine.scheduler.config.max_num_batched_tokens == 700


@pytest.mark.parametrize(
    "case", ["chatglm_6b", "qwen_long", "bloom_7b", "baichuan_13b", "deepseek_v3_halves"]
)
def test_drafts_stand_where_the_prompt_says(case: str, operators: dict[str, Any]) -> None:
    llm = LLM(
        config(
            case,
            batch_size=3,
            attention="append",
            speculate_method="inference_with_reference",
            speculate_max_draft_token_num=4,
            **operators,
        )
    )
    draft_always(llm)
    check_greedy(llm, case)
    assert llm.stats().num_accepted_draft_tokens > 0


@pytest.mark.parametrize(
    ("case", "chunked_prefill", "operators"),
    crossed(["llama_gqa", "qwen2", "chatglm_6b", "qwen_long", "deepseek_v3"], [True, False]),
    indirect=["operators"],
)
def test_preempted_requests_give_the_same_text(
    case: str, chunked_prefill: bool, operators: dict[str, Any]
) -> None:
    llm = LLM(
        config(
            case,
            batch_size=6,
            block_size=16,
            attention="append",
            num_cache_blocks=10,
            chunked_prefill=chunked_prefill,
            **operators,
        )
    )
    expected = golden(case)
    prompts, answers = expected["prompts"][:3] * 3, expected["greedy"][:3] * 3
    assert greedy(llm, prompts, len(answers[0])) == answers
    assert llm.stats().num_preemptions > 0
    assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize(
    "case", ["llama_gqa", "qwen3", "bloom_7b", "gemma2_9b", "qwen_long", "deepseek_v3"]
)
def test_prefix_cache_hit_gives_the_same_text_as_a_miss(
    case: str, operators: dict[str, Any]
) -> None:
    llm = LLM(config(case, batch_size=2, block_size=16, attention="append", **operators))
    check_greedy(llm, case)
    misses = llm.stats().num_prefix_hit_tokens
    check_greedy(llm, case)
    assert llm.stats().num_prefix_hit_tokens > misses


@pytest.mark.parametrize(("case", "operators"), EXPORTS, indirect=["operators"])
def test_an_exported_program_gives_the_same_text_and_logits(
    case: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    for max_length, which in runs(case):
        settings = {"attention": "append", "max_length": max_length, **operators}
        folder = tmp_path / str(max_length)
        export_model(config(case, **settings), folder)
        check_both(folder, case, which, mode="static", **settings)


@pytest.mark.parametrize("composition", list(COMPOSITIONS))
def test_batch_composition_changes_nothing_in_static_mode(
    composition: str, compiled: library.Library, tmp_path: Path
) -> None:
    changes = {"block_size": 32, **COMPOSITIONS[composition], "inference_model": True}
    export_model(config("llama_gqa", **changes), tmp_path)
    check_greedy(LLM(config(tmp_path, mode="static", **changes)), "llama_gqa")


@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_demo_model_says_what_transformers_says(
    mode: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    expected = json.loads((GOLDEN / "demo_model.json").read_text())
    settings = {"attention": "append", "max_length": 256, **operators}
    source = DEMO
    if mode == "static":
        export_model(config(DEMO, **settings), tmp_path)
        source = tmp_path
    llm = LLM(config(source, mode=mode, batch_size=4, **settings))
    params = SamplingParams(max_new_tokens=expected["num_new_tokens"], temperature=0.0)
    outputs = llm.generate([case["prompt"] for case in expected["cases"]], params)
    for case, output in zip(expected["cases"], outputs, strict=True):
        assert list(output.prompt_token_ids) == case["prompt_ids"]
        assert list(output.token_ids) == case["greedy"]
        assert output.text == case["text"]
        assert output.finish_reason == case["finish_reason"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mode", ["dynamic", "static"])
def test_half_precision_stays_close_to_float32(
    dtype: str, mode: str, operators: dict[str, Any], tmp_path: Path
) -> None:
    """Greedy text may part ways at a close call; first tokens come from well-separated logits."""
    case = "llama_gqa"
    settings = {"dtype": dtype, "attention": "append", **operators}
    source: str | Path = case
    if mode == "static":
        export_model(config(case, **settings), tmp_path)
        source = tmp_path
    llm = LLM(config(source, mode=mode, batch_size=3, **settings))
    expected = golden(case)
    answers = greedy(llm, expected["prompts"], 4)
    agreeing = [a[0] == e[0] for a, e in zip(answers, expected["greedy"], strict=True)]
    assert sum(agreeing) >= len(agreeing) - 1
