"""Greedy text with and without drafts, over schemes and cache formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from predict import LLM, SamplingParams
from predict.config.cache import CACHE_TYPES
from predict.device import devices
from tests.support.drafts import METHODS, config, draft_always, drafting, heldout
from tests.support.gpu_products import skip_unless_here

SCHEMES = ("weight_only_int8", "weight_only_int4", "a8w8", "a8w8_fp8", "w4a8")
PAIRS = [
    *((scheme, None) for scheme in SCHEMES),
    *((None, cache_type) for cache_type in CACHE_TYPES),
    ("weight_only_int4", "int4"),
    ("a8w8_fp8", "fp8"),
]
OTHERS = [
    (scheme, cache_type)
    for scheme in SCHEMES
    for cache_type in CACHE_TYPES
    if (scheme, cache_type) not in PAIRS
]
# In 16 bits, products of one row and of several are rounded differently unless batch_invariant is
# on. Where the text without drafts goes another way then, it was near to going that way as well:
# the other token was among the five likeliest, so near (nats). This share of the texts parts at
# most. (On an H200 7 of 50 did in bfloat16, over up to 72 rows.)
NEAR = 0.25
MOST_APART = 0.24


def check(
    demo_with_scales: Path,
    settings: dict[str, Any],
    methods: list[str],
    count: int,
    exact: bool = True,
) -> None:
    """Texts of `count` prompts with each method against those without drafts."""
    settings = {"device": "gpu", "inference_model": True, "batch_size": 8, **settings}
    settings["max_length"] = 256
    prompts = heldout(count)
    params = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True, logprobs=5)
    plain = LLM(config(demo_with_scales, settings)).generate(prompts, params)
    unmeasured = SamplingParams(max_new_tokens=32, temperature=0.0, ignore_eos=True)
    for method in methods:
        drafts = drafting(method, 8)
        if settings.get("dtype", "float32") == "float32":
            drafts.pop("draft_model_quant_type", None)  # on a GPU, for 16 bits
        llm = LLM(config(demo_with_scales, {**settings, **drafts}))
        assert llm.engine.speculation.policy is not None
        draft_always(llm)
        apart = 0
        for wanted, got in zip(plain, llm.generate(prompts, unmeasured), strict=True):
            if got.token_ids == wanted.token_ids:
                continue
            assert not exact, method
            apart += 1
            pairs = zip(wanted.token_ids, got.token_ids, strict=True)
            place = next(i for i, (one, other) in enumerate(pairs) if one != other)
            assert wanted.outputs[0].logprobs is not None
            likely = wanted.outputs[0].logprobs[place]
            gap = likely[wanted.token_ids[place]].logprob - likely[got.token_ids[place]].logprob
            assert gap < NEAR, method
        assert apart <= MOST_APART * count, method
        stats = llm.stats()
        assert stats.num_used_blocks == 0
        assert stats.num_accepted_draft_tokens > 0


def test_text_of_a_few_prompts_is_the_same(gpu: devices.Device, demo_with_scales: Path) -> None:
    check(demo_with_scales, {}, ["inference_with_reference"], 5)


@pytest.mark.parametrize("method", METHODS)
def test_text_of_fifty_prompts_is_the_same(
    gpu: devices.Device, demo_with_scales: Path, method: str
) -> None:
    check(demo_with_scales, {}, [method], 50)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_text_of_fifty_prompts_differs_at_near_ties_alone(
    gpu: devices.Device, demo_with_scales: Path, dtype: str
) -> None:
    check(demo_with_scales, {"dtype": dtype}, list(METHODS), 50, exact=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_batch_invariant_text_of_fifty_prompts_is_the_same(
    gpu: devices.Device, demo_with_scales: Path, dtype: str
) -> None:
    check(demo_with_scales, {"dtype": dtype, "batch_invariant": True}, list(METHODS), 50)


@pytest.mark.parametrize(
    ("scheme", "cache_type"), [*PAIRS, *(pytest.param(*o, marks=pytest.mark.slow) for o in OTHERS)]
)
def test_text_of_fifty_prompts_with_quantization_is_the_same(
    gpu: devices.Device, demo_with_scales: Path, scheme: str | None, cache_type: str | None
) -> None:
    skip_unless_here(scheme)
    settings = {"quant_type": scheme, "cachekv_int8_type": cache_type, "dtype": "bfloat16"}
    check(demo_with_scales, {**settings, "batch_invariant": True}, list(METHODS), 50)
