"""Models with a state per request and drafts of the layer that they were trained with."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.device import library
from predict.errors import UserError
from tests.support import drafters
from tests.support.draft_heads import recorded
from tests.support.drafts import draft_always
from tests.support.hybrid_drafts import final_states, mtp_logits, with_mtp
from tests.support.hybrids import GOLDEN, GREEDY, PROMPTS, config, greedy

CASES = ["qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text"]
DRAFTS: dict[str, Any] = {"speculate_method": "mtp", "speculate_max_draft_token_num": 3}


@pytest.mark.parametrize("case", CASES)
def test_logits_of_drafts_equal_numpy(case: str, operators: dict[str, Any], tmp_path: Path) -> None:
    folder = with_mtp(case, tmp_path / "model", is_joined=case == "qwen3_next")
    llm = LLM(config(folder, **DRAFTS, **operators))
    draft_always(llm)
    for prompt in PROMPTS[:2]:
        with recorded(llm) as found:
            llm.generate([prompt], SamplingParams(temperature=0.0, max_new_tokens=8))
        tokens, logits = next(each for each in found if len(each[1]) > 2)
        states = final_states(llm, tokens[:-1])
        wanted = mtp_logits(case, folder, states, tokens, len(logits))
        for own, theirs in zip(logits, wanted, strict=True):
            most = np.abs(theirs).max()
            np.testing.assert_allclose(own[0], theirs, atol=1e-4 * most, rtol=0)


def scripted(llm: LLM, answers: dict[int, list[int]], seed: int = 0) -> None:
    """Has drafts that are those of the layer, or right ones, of which a fourth are spoilt.

    answers: of prompts of so many tokens.
    """
    proposer: Any = llm.engine.speculation.proposer
    propose, rng = proposer.propose, random.Random(seed)

    def proposed(requests: Sequence[Any], limits: Sequence[int]) -> list[list[int]]:
        made = []
        for request, drafts in zip(requests, propose(requests, limits), strict=True):
            known = answers[request.num_prompt_tokens][request.num_output_tokens :]
            right = [(each + (rng.random() < 0.25)) % 96 for each in known[: len(drafts)]]
            made.append(right or list(drafts))
        return made

    proposer.propose = proposed


def test_rows_behind_accepted_and_rejected_drafts_are_those_of_true_states(
    compiled: library.Library, tmp_path: Path
) -> None:
    case = "qwen3_5_text"
    folder = with_mtp(case, tmp_path / "model")
    llm = LLM(config(folder, **DRAFTS))
    draft_always(llm)
    scripted(llm, {len(p): answer for p, answer in zip(PROMPTS, GOLDEN[case], strict=True)})
    steps = []
    for prompt, answer in zip(PROMPTS[:3], GOLDEN[case], strict=False):
        with recorded(llm) as found:
            assert greedy(llm, [prompt]) == [answer]
        steps += found
    stats = llm.stats()
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens > 4
    for tokens, logits in steps:
        states = final_states(llm, tokens[:-1])
        theirs = mtp_logits(case, folder, states, tokens, 1)[0]
        most = np.abs(theirs).max()
        np.testing.assert_allclose(logits[0][0], theirs, atol=1e-4 * most, rtol=0)


SAMPLED = replace(GREEDY, temperature=1.0, top_p=0.9, seed=3)
WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 37, "batch_size": 2},
    "preempted": {"num_cache_blocks": 24, "block_size": 16, "batch_size": 4},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5"])
def test_text_with_drafts_is_the_text_without(
    case: str, way: str, compiled: library.Library, tmp_path: Path
) -> None:
    prompts = [*PROMPTS, [*PROMPTS[4][:130], 7, 8], [*PROMPTS[4][:100], 9]]
    params = [replace(GREEDY, max_new_tokens=40), replace(SAMPLED, max_new_tokens=40)] * 4
    params = params[: len(prompts)]
    plain = LLM(config(case, batch_size=1, prefix_caching=False))
    wanted = [greedy(plain, [p], s)[0] for p, s in zip(prompts, params, strict=True)]
    llm = LLM(config(with_mtp(case, tmp_path / "model"), **DRAFTS, **WAYS[way]))
    draft_always(llm)
    scripted(llm, {len(p): answer for p, answer in zip(prompts, wanted, strict=True)})
    for _ in range(2):
        found = [list(each.token_ids) for each in llm.generate(prompts, params)]
        assert found == wanted
    llm.engine.scheduler.check()
    stats = llm.stats()
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens > 20
    assert stats.num_prefix_hit_tokens > 0
    assert (stats.num_preemptions > 0) == (way == "preempted")


def eagle(folder: Path) -> Path:
    settings = {**drafters.HEAD_CONFIG, "hidden_size": 32, "vocab_size": 96}
    return drafters.write_head(folder, settings, drafters.eagle1(hidden=32, own_embedding=False))


def medusa(folder: Path) -> Path:
    generator = np.random.default_rng(4)
    made = {
        f"{head}.0.linear.{name}": generator.standard_normal(shape).astype(np.float32)
        for head in range(3)
        for name, shape in (("weight", (32, 32)), ("bias", (32,)))
    }
    return drafters.write_head(folder, {}, made)


@pytest.mark.parametrize(
    ("case", "method"), [("qwen3_5_text", "eagle"), ("lfm2", "eagle"), ("lfm2", "medusa")]
)
def test_heads_change_no_token(
    case: str, method: str, compiled: library.Library, tmp_path: Path
) -> None:
    head = {"eagle": eagle, "medusa": medusa}[method](tmp_path / "head")
    changes = {**DRAFTS, "speculate_method": method, "draft_model_name_or_path": str(head)}
    llm = LLM(config(case, **changes, **WAYS["chunks"]))
    draft_always(llm)
    scripted(llm, {len(p): answer for p, answer in zip(PROMPTS, GOLDEN[case], strict=True)})
    for _ in range(2):
        assert greedy(llm, PROMPTS) == GOLDEN[case]
    stats = llm.stats()
    assert stats.num_draft_tokens > stats.num_accepted_draft_tokens > 4
    assert stats.num_prefix_hit_tokens > 0


def test_a_program_drafts_with_the_layer(compiled: library.Library, tmp_path: Path) -> None:
    case = "qwen3_next"
    whole = config(with_mtp(case, tmp_path / "model"), **DRAFTS)
    export_model(whole, tmp_path / "out", gives_states=True)
    llm = LLM(whole.changed(model_name_or_path=str(tmp_path / "out"), mode="static"))
    draft_always(llm)
    scripted(llm, {len(p): answer for p, answer in zip(PROMPTS, GOLDEN[case], strict=True)})
    assert greedy(llm, PROMPTS) == GOLDEN[case]
    assert llm.stats().num_accepted_draft_tokens > 4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers is 2 \(allowed: 1"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true"),
        ({}, r"has no layer that drafts: mtp.fc.weight"),
    ],
)
def test_layers_that_do_not_draft_are_refused(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folder = with_mtp("qwen3_5_text", tmp_path / "model")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=says):
        LLM(config(folder if changes else "qwen3_5_text", **DRAFTS))
