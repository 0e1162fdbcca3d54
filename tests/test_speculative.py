"""Speculation changes the speed of text and nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.engine import kv_cache
from predict.errors import UserError
from predict.request import Request
from predict.speculative import SpeculativeConfig, accepted_tokens, known_methods, proposer_of
from predict.speculative.inference_with_reference import NgramIndex, match_length
from predict.speculative.lookahead import NgramPool
from predict.speculative.policy import Costs, DraftPolicy
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


def test_the_place_with_the_longest_match_is_followed_and_the_last_of_equal_ones() -> None:
    index = NgramIndex(2)
    tokens = [5, 1, 2, 7, 6, 1, 2, 8, 1, 2]
    index.extend(tokens)
    assert index.find(tokens) == 7  # both places have (1, 2) alone: the last
    assert index.find([*tokens[:8], 5, 1, 2]) == 3
    assert index.find([9, 6]) == 5  # 6 alone
    assert index.find([7, 9]) is None
    assert match_length([1, 2, 3, 1, 2], 2) == 2


def test_ngrams_are_found_however_the_text_grows() -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 60).tolist()
    whole, grown = NgramIndex(3), NgramIndex(3)
    for end in (1, 2, 5, 6, 20, 60):
        grown.extend(tokens[:end])
    whole.extend(tokens)
    assert whole.find(tokens) == grown.find(tokens) is not None


def test_drafts_repeat_what_repeats() -> None:
    proposer = proposer_of(SpeculativeConfig(method="inference_with_reference", max_ngram_size=2))
    request = Request(0, [1, 2, 3, 1, 2], SamplingParams())
    other = Request(1, [4, 5], SamplingParams())
    assert list(map(list, proposer.propose([request, other], [5, 2]))) == [[3, 1, 2, 3, 1], []]
    assert list(map(list, proposer.propose([request], [1]))) == [[3]]
    proposer.forget(0)


def test_pool_follows_what_came_last() -> None:
    pool = NgramPool(2)
    pool.add([1, 2, 3, 1, 2, 4], 1)
    assert pool.follow([7, 1, 2], 3) == [4]
    assert pool.follow([3], 3) == [1, 2, 4]


CPU = Costs(row=0.04)


def test_requests_rest_longer_after_each_failure() -> None:
    policy = DraftPolicy(8, 64, CPU)

    def rest(request_id: int) -> int:
        count = 0
        while policy.is_resting(request_id):
            policy.stepped([request_id], False)
            count += 1
        return count

    rests = []
    for _ in range(9):
        policy.record(0, 2, 0)
        rests.append(rest(0))
    assert rests == [0, 1, 2, 4, 8, 16, 32, 64, 64]
    policy.record(0, 2, 1)
    policy.record(0, 2, 0)
    assert rest(0) == 0
    rests = []
    for _ in range(5):
        policy.missed(1)
        rests.append(rest(1))
    assert rests == [2, 3, 5, 9, 9]


def test_drafts_get_shorter_as_they_fail_and_longer_as_they_succeed() -> None:
    policy = DraftPolicy(8, 64, CPU)
    assert policy.lengths([0], 1) == [8]
    found = []
    for _ in range(12):
        policy.record(0, 4, 0)
        found += policy.lengths([0], 1)
    assert found == sorted(found, reverse=True)
    assert found[0] >= 3
    assert found[-1] == 1
    for _ in range(5):
        policy.record(0, 4, 4)
    assert policy.lengths([0], 1) == [8]


def test_drafts_get_shorter_in_batches_and_where_drafting_costs() -> None:
    policy = DraftPolicy(15, 64, CPU)
    alone = policy.lengths([0], 1)[0]
    among_four = policy.lengths([0, 1, 2, 3], 4)
    assert alone > among_four[0] > 1
    assert len(set(among_four)) == 1
    assert 0 < sum(policy.lengths(list(range(40)), 40)) <= 64
    costly = DraftPolicy(15, 64, Costs(row=0.04, draft=0.2))
    assert 1 < costly.lengths([0], 1)[0] < alone
    assert DraftPolicy(15, 64, Costs(row=0.04, draft=1.0)).lengths([0], 1) == [0]


def test_the_draft_models_cost_is_measured() -> None:
    policy = DraftPolicy(8, 64, Costs(row=0.01, draft=0.1))
    assert policy.lengths([0], 1)[0] > 1
    for _ in range(9):
        policy.time_step(2.0)
        policy.time_drafts(8.0, 4)
    assert policy.costs.draft == 1.0
    assert policy.lengths([0], 1) == [0]


def test_drafts_that_are_never_found_are_no_gain() -> None:
    policy = DraftPolicy(8, 256, Costs(row=0.0055, wait=0.08, wait_each=0.004))
    ids = list(range(64))
    waits = []
    for step in range(256):
        takers = [request_id for request_id in ids if not policy.is_resting(request_id)]
        missing = [i for i, n in zip(takers, policy.lengths(takers, 64), strict=True) if n]
        for request_id in missing:
            policy.missed(request_id)
        waits += [step] * bool(missing)
        policy.stepped(ids, False)
    assert len(waits) <= 10, waits


def test_drafts_that_do_not_pay_are_tried_now_and_then() -> None:
    policy = DraftPolicy(8, 64, Costs(row=0.005, wait=0.1))
    for _ in range(20):
        policy.record(0, 1, 0)
    tries = []
    for step in range(200):
        length = policy.lengths([0], 1)[0]
        if length:
            tries.append(step)
        policy.stepped([0], length > 0)
    assert tries == [64, 129, 194]


def texts(prompts: list[Any], params: Any, **changes: Any) -> tuple[list[tuple[int, ...]], LLM]:
    llm = LLM(config(DEMO, **{"max_length": 160, "attention": "append", **changes}))
    return [output.token_ids for output in llm.generate(prompts, params)], llm


@pytest.fixture
def unused_blocks_are_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = kv_cache.allocate_caches

    def filled(*arguments: Any) -> Any:
        caches = allocate(*arguments)
        for layer in caches:
            for tensor in layer:
                tensor.set_value(np.full(tensor.shape, np.nan, np.float32))
        return caches

    monkeypatch.setattr("predict.llm.allocate_caches", filled)


@pytest.mark.usefixtures("unused_blocks_are_nan")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("batch_size", "inference_model"), [(1, True), (3, True), (3, False)])
def test_text_is_the_same_with_drafts(batch_size: int, method: str, inference_model: bool) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "seed": 11},
        {"temperature": 0.0, "repetition_penalty": 1.2, "min_length": 20},
        {"temperature": 0.6, "top_k": 5, "frequency_penalty": 0.2},
        {"temperature": 0.0, "no_repeat_ngram_size": 4, "bad_words": ["self", "import os"]},
        {"temperature": 0.0, "logit_bias": {10: 3.0, 32: -2.0}, "bad_words": [[11], [12, 13]]},
        {"temperature": 0.7, "typical_p": 0.6, "seed": 5, "presence_penalty": 0.3},
        {"temperature": 0.5, "min_p": 0.1, "seed": 6, "no_repeat_ngram_size": 6, "min_length": 9},
    ]
    lengths = [40] * len(PROMPTS) + [18] * len(PROMPTS)
    params = [
        SamplingParams(max_new_tokens=length, **kind)
        for length, kind in zip(lengths, kinds, strict=True)
    ]
    settings = {"batch_size": batch_size, "inference_model": inference_model}
    expected, _ = texts(PROMPTS * 2, params, **settings)
    got, llm = texts(
        PROMPTS * 2,
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
