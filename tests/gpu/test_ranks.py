"""One model over two GPUs: what one GPU answers, and the end of all where a process ends."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM, Guide, SamplingParams
from predict.device import devices
from predict.errors import EngineError, UserError
from predict.ranks import gpus
from predict.ranks.ahead import AheadRunner
from predict.ranks.life import state_of
from tests.support import gpu_rank, tiny
from tests.support.draft_heads import write_followed, write_knowing
from tests.support.drafts import draft_always
from tests.support.golden import check_greedy, config, greedy, runs
from tests.support.golden_logits import check_logits, logits_and_wanted
from tests.support.gpu_engines import SETTINGS
from tests.support.rank_runs import wait_until
from tests.support.schemes import relative_error

CASE, PROMISE = "llama_gqa", 5.0  # seconds in which all have ended
PROMPTS = [[1, 5, 9, 13, 40, 7, 8, 100, 3, 4, 5], [17, 3], [90, 80, 70, 60, 50]]
# Grouped heads, norms of heads, parallel blocks, ALiBi, experts with biases and shared ones,
# latents, post-norms, and norms over all heads.
GRAPHS = (
    *("llama_gqa", "qwen3", "falcon_40b", "bloom_7b", "gpt_oss_20b", "qwen2_moe_a2_7b"),
    *("deepseek_v3", "gemma3_4b", "olmo2_gqa"),
)
EAGER = ("llama_gqa", "olmo2_gqa")
WHOLE_EXPERTS = ("gpt_oss_20b", "qwen2_moe_a2_7b", "deepseek_v3")


@pytest.fixture(autouse=True)
def two_gpus(gpu: devices.Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    count = len(devices.driver_info().gpus)
    if count < 2:
        pytest.skip(f"ranks have a GPU each, and there are {count}")
    gpu_rank.of_tests(monkeypatch)
    yield
    devices.activate(gpu)


def over_ranks(case: Any, **settings: Any) -> LLM:
    settings = {"batch_size": 3, **SETTINGS, **settings}
    llm = LLM(config(case, tensor_parallel_degree=2, **settings))
    assert isinstance(llm.engine.runner, AheadRunner)
    return llm


def process_ids(llm: LLM) -> list[int]:
    runner = llm.engine.runner
    assert isinstance(runner, AheadRunner)
    return runner._ranks.process_ids


@pytest.mark.parametrize(
    ("case", "graphs", "experts"),
    [
        *((case, True, 1) for case in GRAPHS),
        *((case, False, 1) for case in EAGER),
        *((case, True, 2) for case in WHOLE_EXPERTS),
    ],
)
def test_text_and_logits_equal_transformers(
    case: str, graphs: bool, experts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(gpu_rank.NO_GRAPHS, str(int(not graphs)))
    for max_length, which in runs(case):
        llm = over_ranks(case, max_length=max_length, expert_parallel_degree=experts)
        check_logits(llm, case, which)
        check_greedy(llm, case, which)


def test_half_precision_is_near_one_gpus() -> None:
    """Where the norm's launch sums over ranks: of few rows of 16-bit values."""
    settings: dict[str, Any] = {"dtype": "bfloat16", "batch_size": 3}
    wanted = logits_and_wanted(LLM(config(CASE, **settings, **SETTINGS)), CASE)[0]
    llm = over_ranks(CASE, **settings)
    assert relative_error(logits_and_wanted(llm, CASE)[0], wanted) < 0.05
    assert greedy(llm, PROMPTS[:1], 16) == greedy(llm, PROMPTS[:1], 16)  # by graphs, then


def test_choices_are_those_of_one_gpu() -> None:
    """Steps run ahead; what changes logits by tokens that are on their way waits for them."""
    params = [
        SamplingParams(max_new_tokens=12, temperature=0.0, repetition_penalty=1.3, logprobs=2),
        SamplingParams(max_new_tokens=12, temperature=0.9, seed=5, top_k=20, ignore_eos=True),
        SamplingParams(max_new_tokens=12, temperature=0.0, frequency_penalty=0.5, ignore_eos=True),
    ]
    beams = [replace(SamplingParams(max_new_tokens=6, temperature=0.0), num_beams=3)]
    found = []
    for llm in (LLM(config(CASE, batch_size=3, **SETTINGS)), over_ranks(CASE)):
        answers = [*llm.generate(PROMPTS, params), *llm.generate(PROMPTS[:1], beams)]
        found.append([answer.token_ids for answer in answers])
        assert llm.stats().num_used_blocks == 0
    assert found[0] == found[1]


def test_greedy_tokens_are_found_without_the_logits_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value and an id of each row travel, where penalties, bans and guides change rows too."""
    model = tiny.write_with_tokenizer(tmp_path)
    plain = SamplingParams(max_new_tokens=12, temperature=0.0, ignore_eos=True)
    changes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "logit_bias": {7: 2.0, 300: 3.0, 301: -9.0}},
        {"no_repeat_ngram_size": 2, "bad_words": [[9], [340], [11, 400]]},
        {"frequency_penalty": 0.6, "guide": Guide(regex="[a-z]{2,6} [0-9]+")},
    ]
    adjusted = [replace(plain, **each) for each in changes]
    found = []
    for ranks in (False, True):
        monkeypatch.setenv(gpu_rank.NO_JOINING, str(int(ranks)))
        settings = {**SETTINGS, "batch_size": 3, "max_length": 64}
        llm = over_ranks(model, **settings) if ranks else LLM(config(model, **settings))
        asked = ([plain] * 3, [*adjusted[:2], plain], adjusted)
        texts = [llm.generate(PROMPTS, params) for params in asked]
        found.append([[answer.token_ids for answer in answers] for answers in texts])
    assert found[0] == found[1]


def test_a_program_of_each_rank_answers_as_transformers(tmp_path: Path) -> None:
    ((max_length, which),) = runs(CASE)
    given: dict[str, Any] = {"max_length": max_length, **SETTINGS}
    two = {**given, "device": "gpu:1,0", "tensor_parallel_degree": 2}
    export_model(config(CASE, **two), tmp_path / "out")
    folder = str(tmp_path / "out")
    llm = over_ranks(folder, mode="static", **{**given, "device": "gpu:1,0"})
    check_logits(llm, CASE, which)
    check_greedy(llm, CASE, which)
    with pytest.raises(UserError, match=r"is for 2 rank.*tensor_parallel_degree is 1; give 2"):
        LLM(config(folder, mode="static", **given))


@pytest.mark.parametrize("method", ["draft_model", "eagle", "medusa"])
def test_drafts_and_text_are_those_of_one_gpu(tmp_path: Path, method: str) -> None:
    """Drafts stay on the GPUs, and so do the states that they are made of."""
    model = write_followed(tmp_path / "model", 1.0)
    head = model
    if method != "draft_model":
        of = "state" if method == "medusa" else "token"
        head = write_knowing(tmp_path / "head", method, of)
    settings: dict[str, Any] = {
        "speculate_method": method,
        "draft_model_name_or_path": str(head),
        "speculate_max_draft_token_num": 3,
    }
    params = [
        SamplingParams(max_new_tokens=14, temperature=0.0, ignore_eos=True),
        SamplingParams(max_new_tokens=14, temperature=0.9, seed=5, top_k=20, ignore_eos=True),
        SamplingParams(max_new_tokens=9, temperature=0.0, repetition_penalty=1.3, ignore_eos=True),
    ]
    found = []
    for llm in (
        LLM(config(model, batch_size=3, **settings, **SETTINGS)),
        over_ranks(model, **settings),
    ):
        draft_always(llm)
        prompts = [[token % 60 for token in prompt] for prompt in PROMPTS]
        texts = [answer.token_ids for answer in llm.generate(prompts, params)]
        stats = llm.stats()
        assert stats.num_used_blocks == 0
        assert stats.num_accepted_draft_tokens > 0
        found.append((texts, stats.num_draft_tokens, stats.num_accepted_draft_tokens))
    assert found[0] == found[1]


@pytest.mark.parametrize("scheme", [None, "weight_only_int8"])
def test_random_weights_are_those_of_one_gpu(scheme: str | None) -> None:
    """Made on the GPUs, each its part, and rounded there."""
    dtype = "float32" if scheme is None else "bfloat16"
    settings: dict[str, Any] = {"load_format": "dummy", "dtype": dtype, "quant_type": scheme}
    wanted = logits_and_wanted(LLM(config(CASE, batch_size=3, **settings, **SETTINGS)), CASE)[0]
    got = logits_and_wanted(over_ranks(CASE, **settings), CASE)[0]
    assert relative_error(got, wanted) < (1e-4 if scheme is None else 0.05)


def letter(process_id: int) -> str:
    return state_of(process_id).letter


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_all_in_time(victim: int) -> None:
    llm = over_ranks(CASE, max_length=2048)
    ids = process_ids(llm)
    greedy(llm, PROMPTS, 8)
    said: list[str] = []

    def answer_for_ever() -> None:
        try:
            while True:
                greedy(llm, PROMPTS, 1500)
        except EngineError as error:
            said.append(str(error))

    threading.Thread(target=answer_for_ever, daemon=True).start()
    time.sleep(0.3)
    os.kill(ids[victim], signal.SIGKILL)
    wait_until("all have ended", PROMISE, lambda: said and not any(map(letter, ids)))
    assert f"rank {victim} (process {ids[victim]}) was ended by signal 9" in said[0]


def test_gpus_that_cannot_be_ranks_together_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = devices.driver_info()
    count = len(info.gpus)
    with pytest.raises(UserError, match=f"tensor_parallel_degree {count + 1}: there are {count}"):
        gpus.gpus_of("gpu", count + 1)
    with pytest.raises(UserError, match="gpu:1 names 1 GPUs, and tensor_parallel_degree is 2"):
        gpus.gpus_of("gpu:1", 2)
    assert gpus.gpus_of("gpu:1,0", 2) == [1, 0]
    with pytest.raises(UserError, match="gpu:0,1 names several GPUs, and one process takes one"):
        LLM(config(CASE, **{**SETTINGS, "device": "gpu:0,1"}))
    for change, why in (
        ({"total_bytes": 1 << 30}, "is not like GPU 0"),
        ({"name": "NVIDIA H100 MIG 1g.10gb"}, r"\(MIG\), which reaches no other"),
    ):
        other = replace(info, gpus=(info.gpus[0], replace(info.gpus[1], **change)))
        monkeypatch.setattr(devices, "driver_info", lambda other=other: other)
        with pytest.raises(UserError, match=why):
            gpus.gpus_of("gpu", 2)
