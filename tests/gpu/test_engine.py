"""Whole answers on the GPU: equal to transformers' goldens in float32, with and without graphs."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from predict import LLM, AsyncLLM, EngineConfig, SamplingParams
from predict.device import devices
from predict.errors import UserError
from tests.support import checkpoints, float8, tiny
from tests.support.drafts import Generous
from tests.support.golden import (
    COMPOSITIONS,
    GOLDEN,
    ON_GPU,
    check_greedy,
    config,
    golden,
    greedy,
    runs,
)
from tests.support.golden_logits import check_logits, logits_and_wanted
from tests.support.gpu_engines import FORMS, SETTINGS, answer_config, runner_of
from tests.support.gpu_products import skip_unless_here
from tests.support.paths import DEMO
from tests.support.schemes import relative_error


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ON_GPU)
def test_greedy_text_equals_transformers(gpu: devices.Device, case: str, form: str) -> None:
    for max_length, which in runs(case):
        llm = FORMS[form](LLM(config(case, batch_size=3, max_length=max_length, **SETTINGS)))
        check_greedy(llm, case, which)
        assert bool(runner_of(llm).graphs) == (form != "eager")


@pytest.mark.parametrize("case", ON_GPU)
def test_logits_equal_transformers(gpu: devices.Device, case: str) -> None:
    for max_length, which in runs(case):
        llm = LLM(config(case, batch_size=8, max_length=max_length, **SETTINGS))
        check_logits(llm, case, which)


@pytest.mark.parametrize("form", FORMS)
def test_latents_of_codes_give_transformers_logits_and_text(
    gpu: devices.Device, form: str, tmp_path: Path
) -> None:
    """Their matrices are cut from codes on the host; all others of the golden are floats here."""
    tensors = float8.with_codes_of(checkpoints.stored(GOLDEN / float8.CASE), float8.LATENTS)
    model = float8.written(tmp_path / "model", GOLDEN / float8.CASE, tensors)
    llm = FORMS[form](LLM(config(model, batch_size=8, **SETTINGS)))
    check_logits(llm, float8.CASE)
    check_greedy(llm, float8.CASE)


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_deepseeks_blocks_are_near_transformers(gpu: devices.Device, form: str) -> None:
    """Of the median prompt: rounding may send another one to other experts."""
    skip_unless_here("a8w8_fp8")
    llm = FORMS[form](LLM(config(float8.CASE, batch_size=8, dtype="bfloat16", **SETTINGS)))
    got, wanted = logits_and_wanted(llm, float8.CASE)
    errors = [relative_error(*pair) for pair in zip(got, wanted, strict=True)]
    assert 0 < np.median(errors) < 0.2, errors


@pytest.mark.parametrize("composition", list(COMPOSITIONS))
@pytest.mark.parametrize("case", ["llama_gqa", "qwen2", "mistral_window"])
def test_batch_composition_changes_nothing(
    gpu: devices.Device, case: str, composition: str
) -> None:
    settings: dict[str, Any] = {"block_size": 32, **SETTINGS, **COMPOSITIONS[composition]}
    check_greedy(LLM(config(case, **settings)), case)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_graphs_equal_eager_steps(gpu: devices.Device, dtype: str) -> None:
    expected = golden("llama_gqa")
    answers = [
        greedy(
            change(LLM(config("llama_gqa", batch_size=4, dtype=dtype, **SETTINGS))),
            expected["prompts"],
            8,
        )
        for change in FORMS.values()
    ]
    assert answers[0] == answers[1] == answers[2]
    first = [a[0] == e[0] for a, e in zip(answers[0], expected["greedy"], strict=True)]
    assert sum(first) >= len(first) - 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_model_says_what_transformers_says(gpu: devices.Device, dtype: str) -> None:
    expected = json.loads((GOLDEN / "demo_model.json").read_text())
    llm = LLM(config(DEMO, batch_size=4, max_length=256, dtype=dtype, **SETTINGS))
    params = SamplingParams(max_new_tokens=expected["num_new_tokens"], temperature=0.0)
    outputs = llm.generate([case["prompt"] for case in expected["cases"]], params)
    for case, output in zip(expected["cases"], outputs, strict=True):
        if dtype == "float32":
            assert list(output.token_ids) == case["greedy"]
        else:
            assert list(output.token_ids)[:4] == case["greedy"][:4]


PENALTIES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "output": {"presence_penalty": 0.6, "frequency_penalty": 0.3},
    "min_length": {"min_length": 6, "stop_token_ids": tuple(range(0, 211, 2))},
    "many_banned": {"min_length": 6, "stop_token_ids": tuple(range(1, 200))},
    "ngrams": {"no_repeat_ngram_size": 2},
    "tokens_once": {"no_repeat_ngram_size": 1},
    "bias": {"logit_bias": {token: (-1.0) ** token * 2 for token in range(0, 200, 3)}},
    "bad_words": {"bad_words": [(1,), *((a, b) for a in range(0, 211, 2) for b in (3, 8, 50))]},
    "everything": {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "no_repeat_ngram_size": 3,
        "logit_bias": {17: 1.5, 18: -2.0},
        "bad_words": [(5,), (7, 9)],
        "min_length": 4,
        "stop_token_ids": (3, 4),
    },
}


# Few blocks: some requests are preempted and come back.
CROWDED: dict[str, Any] = {
    "batch_size": 4,
    "block_size": 16,
    "num_cache_blocks": 10,
    "attention": "append",
}


def penalized(kind: str) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts, two of three with penalties."""
    prompts = golden("llama_gqa")["prompts"] * 2
    plain = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    changed = dataclasses.replace(plain, ignore_eos=False, **PENALTIES[kind])
    return prompts, [changed if index % 3 else plain for index in range(len(prompts))]


@functools.cache
def hosts_texts(kind: str) -> list[tuple[int, ...]]:
    """What plain Paddle on the CPU answers to them."""
    return texts(LLM(config("llama_gqa", device="cpu", **CROWDED)), *penalized(kind))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_on_the_device_are_the_hosts(gpu: devices.Device, kind: str, form: str) -> None:
    prompts, params = penalized(kind)
    wanted = hosts_texts(kind)
    devices.activate(gpu)
    device = FORMS[form](LLM(config("llama_gqa", **{**SETTINGS, **CROWDED})))
    assert texts(device, prompts, params) == wanted
    assert wanted != texts(device, prompts, params[0])
    # A request with more rules than the table's rows had room for came: graphs recorded before
    # must not be replayed.
    assert texts(device, prompts, params) == wanted


@pytest.mark.parametrize("kind", PENALTIES)
def test_penalties_see_the_drafts_before_their_row(gpu: devices.Device, kind: str) -> None:
    prompts = [[*prompt, *prompt[-20:], *prompt[-20:]] for prompt in golden("llama_gqa")["prompts"]]
    params = SamplingParams(max_new_tokens=24, temperature=0.0, **PENALTIES[kind])
    drafts = {"speculate_method": "lookahead", "speculate_max_draft_token_num": 6}
    plain = LLM(config("llama_gqa", batch_size=3, max_length=200, **SETTINGS))
    drafting = LLM(config("llama_gqa", batch_size=3, max_length=200, **SETTINGS, **drafts))
    drafting.engine.speculation.policy = Generous(6, 18, looks_up=True)
    assert texts(drafting, prompts, params) == texts(plain, prompts, params)
    assert drafting.stats().num_draft_tokens > 0


def test_a_request_with_many_rules_joins_recorded_graphs(gpu: devices.Device) -> None:
    prompts = golden("llama_gqa")["prompts"][:3]
    few = SamplingParams(max_new_tokens=12, temperature=0.0, repetition_penalty=1.2)
    many = dataclasses.replace(few, logit_bias=dict.fromkeys(range(0, 211, 2), 1.0))
    device = LLM(config("llama_gqa", batch_size=3, **SETTINGS))
    host = LLM(config("llama_gqa", batch_size=3, device="cpu"))
    for params in (few, [few, many, few], few):
        assert texts(device, prompts, params) == texts(host, prompts, params)


def texts(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


def test_min_p_leaves_out_unlikely_tokens(gpu: devices.Device) -> None:
    llm = LLM(config("llama_gqa", batch_size=8, **SETTINGS))
    prompt = golden("llama_gqa")["prompts"][0]
    greedy_text = texts(llm, [prompt], SamplingParams(max_new_tokens=8, temperature=0.0))
    params = SamplingParams(max_new_tokens=8, temperature=1.0, min_p=0.999)
    assert texts(llm, [prompt] * 8, params) == greedy_text * 8


def test_sampling_repeats_with_its_seed(gpu: devices.Device) -> None:
    llm = LLM(config("llama_gqa", batch_size=3, **SETTINGS))
    params = SamplingParams(max_new_tokens=8, temperature=1.0, top_k=20, top_p=0.9, seed=7)
    prompts = golden("llama_gqa")["prompts"][:3]
    first, second = (
        [list(output.token_ids) for output in llm.generate(prompts, params)] for _ in range(2)
    )
    assert first == second


def test_plain_operators_are_refused(gpu: devices.Device) -> None:
    with pytest.raises(UserError, match="--inference_model false"):
        LLM(config("llama_gqa", device="gpu"))


DRAFTS: dict[str, Any] = {"speculate_method": "lookahead", "speculate_max_draft_token_num": 4}


@pytest.mark.parametrize(
    "changes", [{}, {"max_num_batched_tokens": 24}, {"num_cache_blocks": 17}, DRAFTS]
)
def test_logprobs_equal_those_of_the_cpu(gpu: devices.Device, changes: dict[str, Any]) -> None:
    greedy = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    params = [
        dataclasses.replace(greedy, logprobs=4, prompt_logprobs=2),
        dataclasses.replace(greedy, logprobs=20, repetition_penalty=1.3, presence_penalty=2.0),
        dataclasses.replace(greedy, prompt_logprobs=0, frequency_penalty=3.0),
        greedy,
    ]
    prompts = [list(range(100, 170)), [300, 301, 302, 300, 301], list(range(100, 133)), [7]]
    on_gpu, on_cpu = (
        LLM(answer_config(device=device, **changes)).generate(prompts, params)
        for device in ("gpu", "cpu")
    )
    for got, wanted in zip(on_gpu, on_cpu, strict=True):
        assert got.token_ids == wanted.token_ids
        pairs: list[tuple[Any, Any]] = [(got.outputs[0].logprobs, wanted.outputs[0].logprobs)]
        pairs.append((got.prompt_logprobs, wanted.prompt_logprobs))
        for ours, theirs in pairs:
            assert (ours is None) == (theirs is None)
            for entry, expected in zip(ours or (), theirs or (), strict=True):
                assert (entry is None) == (expected is None)
                if entry is None or expected is None:
                    continue
                assert next(iter(entry)) == next(iter(expected))
                for token in entry.keys() & expected.keys():
                    assert entry[token].logprob == pytest.approx(expected[token].logprob, abs=2e-3)


def test_samples_and_stop_strings_with_steps_ahead(gpu: devices.Device) -> None:
    llm = LLM(answer_config())
    prompt = "def binary_search(items, target):"
    sampled = SamplingParams(temperature=0.9, seed=3, n=3, max_new_tokens=40, ignore_eos=True)
    (output,) = llm.generate([prompt], sampled)
    for index, each in enumerate(output.outputs):
        alone = dataclasses.replace(sampled, n=1, seed=3 + index)
        stop = each.text[20:25]
        (stopped,) = llm.generate([prompt], dataclasses.replace(alone, stop=stop))
        assert stopped.text == each.text[: each.text.index(stop)]
        assert stopped.token_ids == each.token_ids[: len(stopped.token_ids)]
        pieces = list(llm.stream(prompt, alone))
        assert "".join(piece.text for piece in pieces) == each.text
    assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize("form", FORMS)
def test_rows_without_numbers_end_their_request_alone(
    gpu: devices.Device, tmp_path: Path, form: str
) -> None:
    """Token 7 has no numbers: what is computed of it is NaN, in the cache too."""
    directory = tiny.write(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = np.nan
    save_file(weights, directory / "model.safetensors")
    settings: dict[str, Any] = {"max_length": 64, "block_size": 16, "batch_size": 3, **SETTINGS}
    llm = FORMS[form](LLM(EngineConfig(model_name_or_path=str(directory), **settings)))
    greedy = SamplingParams(max_new_tokens=20, temperature=0.0, bad_words=((7,),), ignore_eos=True)
    alone = [llm.generate([prompt], greedy)[0].token_ids for prompt in ([1, 2, 3], [4, 5])]
    for _ in range(2):
        first, broken, last = llm.generate([[1, 2, 3], [6, 7], [4, 5]], greedy)
        assert [first.token_ids, last.token_ids] == alone
        assert broken.finish_reason == "error"
        assert "no finite largest logit" in (broken.outputs[0].error or "")
        assert llm.stats().num_used_blocks == 0


def test_an_engine_thread_runs_graphs(gpu: devices.Device) -> None:
    prompts = ["def add(a, b):", "class Stack:", "import os\n"]
    greedy = SamplingParams(temperature=0.0, max_new_tokens=20, logprobs=1)
    expected = LLM(answer_config()).generate(prompts, greedy)

    async def main() -> None:
        async with AsyncLLM(answer_config()) as llm:
            outputs = await asyncio.gather(*(llm.generate(p, greedy) for p in prompts))
            assert [output.text for output in outputs] == [output.text for output in expected]
            task = asyncio.create_task(llm.generate(prompts[0], greedy))
            await asyncio.sleep(0.01)
            task.cancel()
            while (await llm.stats()).num_used_blocks:
                await asyncio.sleep(0.01)

    asyncio.run(main())
