"""Speculation changes the speed of text and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from predict import LLM, SamplingParams
from predict.errors import UserError
from predict.request import Request
from predict.speculative import SpeculativeConfig, accepted_tokens, known_methods, proposer_of
from predict.speculative.inference_with_reference import NgramIndex
from predict.speculative.lookahead import NgramPool
from predict.speculative.policy import DraftPolicy
from tests.test_golden import DEMO, config, golden

# Settings of each method; the draft model is the demo model itself, rounded.
METHODS: dict[str, dict[str, Any]] = {
    "inference_with_reference": {"speculate_max_ngram_size": 3},
    "lookahead": {"speculate_max_ngram_size": 3},
    "draft_model": {
        "draft_model_name_or_path": str(DEMO),
        "draft_model_quant_type": "weight_only_int4",
    },
}
PROMPTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a",
    "import os\nimport sys\n\nimport os\nimport",
    "for i in range(10):\n    print(i)\n\nfor j in range(10):\n    print(",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop",
]


def test_right_drafts_stand_and_the_first_wrong_one_is_replaced() -> None:
    assert accepted_tokens([4, 5], [4, 5, 6]) == [4, 5, 6]
    assert accepted_tokens([4, 5], [4, 7, 6]) == [4, 7]
    assert accepted_tokens([4, 5], [1, 5, 6]) == [1]
    assert accepted_tokens([], [9]) == [9]


def test_the_longest_ngram_is_followed_and_the_prompt_before_the_output() -> None:
    index = NgramIndex(2)
    tokens = [1, 2, 3, 9, 2, 4]
    index.extend(tokens, 3)
    assert index.find([*tokens, 2]) == 2
    tokens += [9, 2]
    index.extend(tokens, 3)
    assert index.find(tokens) == 5  # behind (9, 2), which only the output has whole
    assert index.find([7, 8]) is None


def test_drafts_stop_where_the_text_does() -> None:
    proposer = proposer_of(SpeculativeConfig(method="inference_with_reference", max_ngram_size=2))
    request = Request(0, [1, 2, 3, 1, 2], SamplingParams())
    other = Request(1, [4, 5], SamplingParams())
    assert list(map(list, proposer.propose([request, other], [8, 2]))) == [[3, 1, 2], []]
    assert list(map(list, proposer.propose([request], [1]))) == [[3]]
    proposer.forget(0)


def test_pool_follows_what_came_last() -> None:
    pool = NgramPool(2)
    pool.add([1, 2, 3, 1, 2, 4], 1)
    assert pool.follow([7, 1, 2], 3) == [4]
    assert pool.follow([3], 3) == [1, 2, 4]


def test_requests_rest_longer_after_each_failure_and_grow_with_success() -> None:
    policy = DraftPolicy(8, 64)
    assert policy.length(0, 1) == 8
    assert policy.length(0, 16) == 3
    assert policy.length(0, 64) == 0
    rests = []
    for _ in range(9):
        policy.record(0, 2, 0)
        rest = 0
        while policy.is_resting(0):
            policy.rested(0)
            rest += 1
        rests.append(rest)
    assert rests == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    rests = []
    for _ in range(5):
        policy.missed(1)
        rests.append(0)
        while policy.is_resting(1):
            policy.rested(1)
            rests[-1] += 1
    assert rests == [2, 3, 5, 9, 9]
    assert policy.length(0, 1) == 1
    policy.record(0, 1, 1)
    assert policy.length(0, 1) == 3
    policy.record(0, 3, 2)
    assert policy.length(0, 1) == 2


def texts(prompts: list[Any], params: Any, **changes: Any) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(config(DEMO, **{"max_length": 160, "attention": "append", **changes}))
    return [output.token_ids for output in llm.generate(prompts, params)], llm


@pytest.mark.parametrize("inference_model", [False, True])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_text_is_the_same_with_drafts(batch_size: int, method: str, inference_model: bool) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 11},
        {"temperature": 0.0, "repetition_penalty": 1.2, "min_length": 20},
        {"temperature": 0.6, "top_k": 5, "frequency_penalty": 0.2},
    ]
    params = [SamplingParams(max_new_tokens=40, **kind) for kind in kinds]
    settings = {"batch_size": batch_size, "inference_model": inference_model}
    expected, _ = texts(PROMPTS, params, **settings)
    got, llm = texts(
        PROMPTS,
        params,
        speculate_method=method,
        speculate_max_draft_token_num=5,
        **METHODS[method],
        **settings,
    )
    assert got == expected
    stats = llm.stats()
    assert 0 < stats.num_accepted_draft_tokens <= stats.num_draft_tokens
    assert llm.engine.scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("case", ["llama_gqa", "mistral_window", "qwen2"])
def test_goldens_with_drafts_preemption_and_chunks(case: str) -> None:
    expected = golden(case)
    llm = LLM(
        config(
            case,
            attention="append",
            batch_size=4,
            block_size=16,
            num_cache_blocks=10,
            max_num_batched_tokens=24,
            speculate_method="lookahead",
            speculate_max_draft_token_num=12,
        )
    )
    params = SamplingParams(max_new_tokens=len(expected["greedy"][0]), temperature=0.0)
    outputs = llm.generate(expected["prompts"], params)
    assert [list(output.token_ids) for output in outputs] == expected["greedy"]


def test_every_method_is_tested() -> None:
    assert sorted(METHODS) == known_methods()


def test_bad_settings_are_refused_before_loading() -> None:
    with pytest.raises(UserError, match="draft_model, inference_with_reference, lookahead"):
        config(DEMO, speculate_method="medusa")
    with pytest.raises(UserError, match="1 to 15"):
        config(DEMO, speculate_method="lookahead", speculate_max_draft_token_num=16)
    with pytest.raises(UserError, match="1 or more"):
        config(DEMO, speculate_method="lookahead", speculate_max_ngram_size=0)
