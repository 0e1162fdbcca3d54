"""The draft model: its cache in the target's blocks, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.adapters.prefixes import NO_PREFIX, ServedPrefix, prefix_in
from predict.engine.drafts import DraftNetwork
from predict.engine.request_state import Request
from predict.engine.sampler import Sampler
from predict.errors import UserError
from predict.loading.memory import bytes_per_token, num_cache_blocks
from predict.speculative.draft_model import DraftModelProposer
from tests.support.draft_models import BLOCK, VOCABULARY, CacheReader, ReadTokens, expected
from tests.support.drafts import draft_always
from tests.support.golden import GOLDEN, config, golden
from tests.support.paths import DEMO


def make(num_blocks: int, ahead: bool = False, budget: int = 32) -> DraftModelProposer:
    target = CacheReader(0, ahead) if ahead else None
    return DraftModelProposer(
        DraftNetwork(
            runner=CacheReader(num_blocks + 8, ahead, target=target),
            sampler=Sampler(0, ()),
            block_size=BLOCK,
            num_blocks=num_blocks,
            token_budget=budget,
        )
    )


def request(
    number: int, tokens: list[int], block_ids: list[int], prefix: ServedPrefix = NO_PREFIX
) -> Request:
    made = Request(number, tokens, SamplingParams(), prefix=prefix)
    made.block_ids = block_ids
    return made


def check(proposer: DraftModelProposer, requests: list[Request], limits: list[int]) -> None:
    proposals = proposer.propose(requests, limits)
    runner = proposer.network.runner
    assert isinstance(runner, CacheReader)
    shelf: list[int] = []
    if runner.target is not None:
        shelf, runner.target.shelf = runner.target.shelf, []
    for each, limit, proposed in zip(requests, limits, proposals, strict=True):
        drafts = ReadTokens([], shelf).known(proposed)
        assert drafts == expected(each.token_ids, limit), each
        proposer.observe(each, drafts[: 1 + each.num_tokens % limit], [])


@pytest.mark.parametrize("ahead", [False, True])
def test_requests_of_all_lengths_draft_together_and_roll_back(ahead: bool) -> None:
    """Verified at random, grown, preempted: each draft is read from a right cache."""
    random = np.random.default_rng(0)
    proposer = make(80, ahead)
    free = list(range(80))
    random.shuffle(free)
    # Tuned prefixes, which the target alone has: in parts of a block, in whole blocks, in both.
    prefixes = [NO_PREFIX]
    for length in (5, 2 * BLOCK, BLOCK + 9):
        pinned = [free.pop() for _ in range(-(-length // BLOCK))]
        prefixes.append(prefix_in("p", length, pinned, BLOCK, for_drafts=True))
    requests: list[Request] = []

    def own(each: Request) -> list[int]:
        return each.block_ids[len(each.prefix.block_ids) :]

    for number in range(300):
        if len(requests) < 5 or random.random() < 0.1:
            tokens = random.integers(0, VOCABULARY, int(random.integers(1, 70))).tolist()
            prefix = prefixes[number % len(prefixes)]
            requests.append(request(number, tokens, list(prefix.block_ids), prefix))
        while len(requests) > 6:
            ended = requests.pop(int(random.integers(len(requests))))
            proposer.forget(ended.request_id)
            free += own(ended)
        if random.random() < 0.1:
            preempted = requests[int(random.integers(len(requests)))]
            free += own(preempted)
            random.shuffle(free)
            preempted.block_ids = list(preempted.prefix.block_ids)
        for each in requests:
            # The last token's block may come with the step behind the drafts.
            needed = each.prefix.num_reserved + each.num_tokens
            while len(each.block_ids) * BLOCK < needed - int(random.integers(2)):
                each.block_ids.append(free.pop())
        some = [each for each in requests if random.random() < 0.8]
        limits = random.integers(1, 16, len(some)).tolist()
        if some:
            check(proposer, some, limits)
        for each, limit in zip(some, limits, strict=True):
            kept = int(random.integers(0, limit + 1))
            right = expected(each.token_ids, limit)
            each.token_ids += [*right[:kept], int(random.integers(VOCABULARY))]
            if each.num_tokens > 130:
                requests.remove(each)
                proposer.forget(each.request_id)
                free += own(each)


def test_prompts_longer_than_a_step_catch_up_in_chunks() -> None:
    proposer = make(64, budget=20)
    prompts = [list(range(45)), [7], list(range(30, 49)) * 3]
    requests, first = [], 0
    for number, prompt in enumerate(prompts):
        blocks = -(-len(prompt) // BLOCK)
        requests.append(request(number, prompt, list(range(first, first + blocks))))
        first += blocks
    check(proposer, requests, [3, 1, 15])
    assert first < 64


def test_blocks_of_a_cached_prefix_are_not_computed_again() -> None:
    proposer = make(16)
    runner = proposer.network.runner
    assert isinstance(runner, CacheReader)
    prompt = list(range(40))
    digests = [b"first", b"second"]
    one = request(0, prompt, [3, 5, 7])
    one.block_digests = digests
    check(proposer, [one], [4])
    before = runner.num_tokens
    other = request(1, prompt, [3, 5, 9])  # shares two full blocks
    other.block_digests = list(digests)
    check(proposer, [other], [4])
    assert runner.num_tokens - before == 40 - 32 + 3
    # Preempted, its blocks were somebody else's for a while.
    other.block_ids = [3, 5, 9]
    thief = request(2, [9] * 20, [5, 3])
    check(proposer, [thief], [2])
    check(proposer, [other], [4])


def test_blocks_behind_a_prefix_are_shared_where_the_target_s_are() -> None:
    proposer = make(16)
    runner = proposer.network.runner
    assert isinstance(runner, CacheReader)
    prefix = prefix_in("p", 20, [10, 11], BLOCK, for_drafts=True)  # a block, and 4 tokens
    prompt = [token % VOCABULARY for token in range(60)]
    digests = [b"12 tokens", b"28", b"44"]  # blocks of the target that are full, the copy's first
    one = request(0, prompt, [10, 0, 1, 2, 3, 4], prefix)
    one.block_digests = digests
    check(proposer, [one], [4])
    before = runner.num_tokens
    other = request(1, [*prompt[:44], *prompt[:9]], [10, 0, 1, 2, 5, 6], prefix)
    other.block_digests = list(digests)
    check(proposer, [other], [4])
    # Of its 53 tokens 32 lie in the shared blocks 1 and 2; none is written to them again.
    assert runner.num_tokens - before == 53 - 32 + 3
    check(proposer, [one, other], [4, 4])


def write_draft(path: Path, **changes: Any) -> str:
    """A demo model's folder with another config.json; no weights."""
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path / name)
    values = json.loads((DEMO / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **changes}))
    return str(path)


def test_unsuitable_draft_models_are_refused_before_loading(tmp_path: Path) -> None:
    def refused(path: str, words: str, **changes: Any) -> None:
        with pytest.raises(UserError, match=words):
            LLM(
                config(
                    DEMO,
                    **{"speculate_method": "draft_model", **changes},
                    draft_model_name_or_path=path,
                )
            )

    refused(str(tmp_path / "nowhere"), "nowhere")
    refused(str(GOLDEN / "llama_gqa"), "vocab_size .* the model has 5120")
    refused(write_draft(tmp_path / "short", max_position_embeddings=100), "made for 100 positions")
    other = write_draft(tmp_path / "other")
    text = (tmp_path / "other" / "tokenizer.json").read_text()
    tokens = json.loads(text)
    vocab = tokens["model"]["vocab"]
    ordered = sorted(vocab, key=vocab.__getitem__)
    left, right = ordered[300], ordered[301]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(tokens))
    refused(other, "another tokenizer: token")
    missing = write_draft(tmp_path / "empty")
    refused(missing, "safetensors")


@pytest.mark.parametrize("draft", ["chatglm_6b", "qwen_long"])
def test_draft_models_that_place_tokens_by_the_prompt_are_refused(draft: str) -> None:
    drafts = {"speculate_method": "draft_model", "draft_model_name_or_path": str(GOLDEN / draft)}
    with pytest.raises(UserError, match="places tokens by the prompt that they follow"):
        LLM(config("llama_gqa", **drafts))


def test_flags_of_draft_models_go_together() -> None:
    with pytest.raises(UserError, match="needs --draft_model_name_or_path"):
        config(DEMO, speculate_method="draft_model")
    with pytest.raises(UserError, match="leave one of the two out"):
        config(DEMO, speculate_method="lookahead", draft_model_name_or_path=str(DEMO))
    with pytest.raises(UserError, match="leave one of the two out"):
        config(DEMO, draft_model_quant_type="weight_only_int8")
    with pytest.raises(UserError, match="without c8"):
        config(
            DEMO,
            speculate_method="draft_model",
            draft_model_name_or_path=str(DEMO),
            draft_model_quant_type="a8w8c8",
        )


def test_the_drafts_cache_counts_in_the_blocks_that_fit() -> None:
    settings = config(DEMO, batch_size=64, attention="append")
    spec = LLM(config(DEMO)).spec
    small = dataclasses.replace(spec, layers=spec.layers[: spec.num_layers // 2 + 1])
    assert bytes_per_token(settings, spec, small) * 7 == bytes_per_token(settings, spec) * 11
    alone = num_cache_blocks(settings, spec, 1 << 25)
    assert num_cache_blocks(settings, spec, 1 << 25, small) == alone * 7 // 11


@pytest.mark.parametrize("draft", ["qwen2", "qwen3", "mistral_window"])
def test_a_draft_of_another_family_drafts_for_a_preempted_batch(draft: str) -> None:
    """It seldom agrees, and the text stays."""
    expected_text = golden("llama_gqa")
    llm = LLM(
        config(
            "llama_gqa",
            attention="append",
            batch_size=4,
            block_size=16,
            num_cache_blocks=10,
            max_num_batched_tokens=24,
            speculate_method="draft_model",
            speculate_max_draft_token_num=7,
            draft_model_name_or_path=str(GOLDEN / draft),
        )
    )
    draft_always(llm)
    params = SamplingParams(max_new_tokens=len(expected_text["greedy"][0]), temperature=0.0)
    outputs = llm.generate(expected_text["prompts"], params)
    assert [list(output.token_ids) for output in outputs] == expected_text["greedy"]
    assert llm.stats().num_draft_tokens > 0
    assert llm.stats().num_used_blocks == 0
