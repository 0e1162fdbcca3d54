"""The table of what drafts go together with, pair by pair; and text with and without drafts."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.config import schemes
from predict.config.cache import CACHE_TYPES
from predict.config.engine import check_params
from predict.device import library
from predict.errors import UserError
from tests.support.drafts import METHODS, PROMPTS, config, draft_always, drafting, heldout

GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
SCHEMES = (None, "weight_only_int8", "weight_only_int4", "a8w8", "w4a8")
Answers = list[tuple[tuple[int, ...], ...]]


def answers(llm: LLM, prompts: Sequence[Any], params: SamplingParams) -> Answers:
    draft_always(llm)
    drafted = llm.stats().num_draft_tokens
    outputs = llm.generate(prompts, params)
    stats = llm.stats()
    assert stats.num_used_blocks == 0
    assert (stats.num_draft_tokens > drafted) == (llm.engine.speculation.policy is not None)
    return [tuple(one.token_ids for one in output.outputs) for output in outputs]


class Feature(NamedTuple):
    """Something to combine drafts with: fields of EngineConfig, and of SamplingParams."""

    name: str
    settings: Mapping[str, Any] = {}
    params: Mapping[str, Any] = {}


PLAIN = {"inference_model": False}
FEATURES = (
    Feature("plain operators", PLAIN),
    Feature("reserved cache", {"attention": "reserved"}),
    Feature("--block_attn", {"attention": "block"}),
    Feature("--append_attn", {"attention": "append"}),
    Feature("no prefix cache", {"prefix_caching": False}),
    Feature("whole prompts", {"chunked_prefill": False}),
    Feature("short steps", {"max_num_batched_tokens": 16}),
    Feature("static mode", {"mode": "static"}),
    Feature("bfloat16", {"dtype": "bfloat16"}),
    Feature("float16", {"dtype": "float16"}),
    # Of the CPU's operators plain Paddle alone has some.
    *(
        Feature(f"quant_type {name}", {"quant_type": name, **({} if row.support.cpu else PLAIN)})
        for name, row in schemes.SCHEMES.items()
    ),
    Feature("quantized LM head", {"lm_head_quant_type": "weight_only_int8"}),
    *(Feature(f"cachekv_int8_type {name}", {"cachekv_int8_type": name}) for name in CACHE_TYPES),
    Feature("sampling", params={"temperature": 0.8, "top_k": 40, "top_p": 0.9, "seed": 3}),
    Feature("min_p", params={"temperature": 1.0, "min_p": 0.1, "seed": 4}),
    Feature("typical_p", params={"temperature": 1.0, "typical_p": 0.8, "seed": 5}),
    Feature("repetition_penalty", params={"repetition_penalty": 1.3}),
    Feature("two penalties", params={"presence_penalty": 0.5, "frequency_penalty": 0.2}),
    Feature("no_repeat_ngram_size", params={"no_repeat_ngram_size": 3}),
    Feature("min_length", params={"min_length": 8, "stop_token_ids": (200, 202, 204)}),
    Feature("logit_bias", params={"logit_bias": {200: 4.0, 202: -4.0}}),
    Feature("bad words", params={"bad_words": ((200,), (202, 203))}),
    Feature("stop strings", params={"stop": ("\n\n", "return x")}),
    Feature("n", params={"n": 3, "temperature": 0.9, "seed": 6}),
    Feature("best_of", params={"n": 1, "best_of": 3, "temperature": 0.9, "seed": 7}),
    Feature("logprobs", params={"logprobs": 3}),
    Feature("prompt_logprobs", params={"prompt_logprobs": 1}),
)


@functools.cache
def without_drafts(directory: Path, name: str) -> Answers:
    feature = next(feature for feature in FEATURES if feature.name == name)
    return run(directory, feature, {})


@functools.cache
def plain_engine(directory: Path, drafts: str) -> LLM:
    """One for all features that are of a request alone; drafts: settings, as JSON."""
    return LLM(config(directory, json.loads(drafts)))


def run(directory: Path, feature: Feature, drafts: Mapping[str, Any]) -> Answers:
    params = SamplingParams(**{**GREEDY, **feature.params})
    settings = {**feature.settings}
    if settings.pop("mode", "dynamic") == "static":
        static = directory.parent / "static"
        if not static.exists():
            export_model(config(directory, settings), static)
        settings |= {"mode": "static"}
        directory = static
    prompts = PROMPTS if settings.get("inference_model", True) else PROMPTS[:2]  # ten times slower
    if settings:
        llm = LLM(config(directory, {**settings, **drafts}))
    else:
        llm = plain_engine(directory, json.dumps(drafts))
    return answers(llm, prompts, params)


# With each feature drafts of a model, and by turns one of the methods that look them up.
TURNS = cycle(method for method in METHODS if method != "draft_model")
PAIRS = [
    pytest.param(method, feature, id=f"{method}-{feature.name}")
    for feature in FEATURES
    for method in ("draft_model", next(TURNS))
]


@pytest.mark.parametrize(("method", "feature"), PAIRS)
def test_text_is_the_same_with_whatever_drafts_go_with(
    demo_with_scales: Path, method: str, feature: Feature
) -> None:
    assert run(demo_with_scales, feature, drafting(method)) == without_drafts(
        demo_with_scales, feature.name
    )


@pytest.mark.parametrize("method", METHODS)
def test_beams_are_refused_by_name(demo_with_scales: Path, method: str) -> None:
    settings = config(demo_with_scales, drafting(method))
    with pytest.raises(UserError, match="does not go with beam search; leave out one"):
        check_params(SamplingParams(num_beams=2), settings)


def check_many(
    demo_with_scales: Path, scheme: str | None, cache_type: str | None, prompts: list[str]
) -> dict[str, float]:
    """Texts of all methods; the share of accepted drafts of each."""
    settings = {"quant_type": scheme, "cachekv_int8_type": cache_type, "batch_size": 8}
    settings["max_length"] = 256
    params = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
    wanted = answers(LLM(config(demo_with_scales, settings)), prompts, params)
    shares = {}
    for method in METHODS:
        llm = LLM(config(demo_with_scales, {**settings, **drafting(method, 8)}))
        got = answers(llm, prompts, params)
        assert got == wanted, method
        stats = llm.stats()
        shares[method] = stats.num_accepted_draft_tokens / stats.num_draft_tokens
    return shares


@pytest.mark.parametrize(
    ("scheme", "cache_type"), [(None, "int4"), ("weight_only_int4", None), ("a8w8", "dynamic")]
)
def test_greedy_text_of_a_few_prompts_is_the_same(
    demo_with_scales: Path, compiled: library.Library, scheme: str | None, cache_type: str | None
) -> None:
    assert min(check_many(demo_with_scales, scheme, cache_type, heldout(8)).values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "cache_type"), [*zip(SCHEMES, cycle([*CACHE_TYPES, None]))])
def test_greedy_text_of_100_prompts_is_the_same(
    demo_with_scales: Path, compiled: library.Library, scheme: str | None, cache_type: str | None
) -> None:
    assert min(check_many(demo_with_scales, scheme, cache_type, heldout(100)).values()) > 0


@pytest.mark.parametrize("method", METHODS)
def test_greedy_text_stays_exact_under_window_verification(
    demo_with_scales: Path, method: str
) -> None:
    greedy = Feature("short steps")
    drafts = {**drafting(method), "speculate_verify_window": 2}
    assert run(demo_with_scales, greedy, drafts) == without_drafts(
        demo_with_scales, "--append_attn"
    )


def test_window_verification_says_so_once_and_lets_more_drafts_stand(
    demo_with_scales: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=1.0, top_p=0.95, seed=1, ignore_eos=True)
    shares = []
    for extra in ({}, {"speculate_max_candidate_len": 10}):
        settings = {**drafting("inference_with_reference"), **extra}
        llm = LLM(config(demo_with_scales, settings))
        llm.generate(PROMPTS * 4, [dataclasses.replace(params, seed=i) for i in range(16)])
        stats = llm.stats()
        shares.append(stats.num_accepted_draft_tokens / stats.num_draft_tokens)
        assert caplog.text.count("TopP + window verification") == bool(extra)
    assert shares[1] > 1.1 * shares[0]
