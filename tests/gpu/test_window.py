"""TopP + window verification on the GPU: drafts stand as predict.engine.window says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from predict.engine.draft_policy import DraftPolicy
from predict.engine.request_state import Request
from predict.speculative.draft_model import DraftModelProposer
from tests.support.golden import GOLDEN, config, golden
from tests.support.gpu_engines import SETTINGS, answer_config, without_graphs


class FixedDrafts(DraftPolicy):
    """As many drafts in every step: the text depends on which drafts there are."""

    def limits(self, requests: Sequence[Request], on_way: bool) -> dict[Request, int]:
        rooms = {r: r.max_num_tokens - r.num_tokens - 1 for r in requests}
        return {r: min(room, self.max_length) for r, room in rooms.items() if room > 0}


def with_fixed_drafts(llm: LLM) -> LLM:
    most = llm.config.speculation.speculate_max_draft_token_num
    llm.engine.speculation.policy = FixedDrafts(most, 64, looks_up=False)
    return llm


def test_texts_are_those_of_the_cpu(gpu: devices.Device) -> None:
    prompts = [
        "def add(a, b):\n    return a + b\n\ndef add3(a, b, c):\n    return a + b",
        "for i in range(10):\n    print(i)\nfor j in range(10):\n    print",
        "class A:\n    pass\n\nclass B:\n    pass\n\nclass C:",
        "x = 1\ny = 2\nx = 1\n",
    ]
    loose = SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=40, seed=1, ignore_eos=True)
    params = [
        loose,
        dataclasses.replace(loose, top_k=20, min_p=0.02, repetition_penalty=1.2),
        dataclasses.replace(loose, temperature=0.0),
        dataclasses.replace(loose, logprobs=2),
    ]
    drafts: dict[str, Any] = {
        "speculate_method": "inference_with_reference",
        "speculate_max_draft_token_num": 6,
        "speculate_verify_window": 2,
        "speculate_max_candidate_len": 8,
    }
    cpu, graphs, eager = (
        LLM(answer_config(device=device, **drafts)) for device in ("cpu", "gpu", "gpu")
    )
    without_graphs(eager)
    answers = []
    for llm in (cpu, graphs, eager):
        with_fixed_drafts(llm)
        outputs = llm.generate(prompts, params)
        outputs += llm.generate(prompts[:3], params[:3])  # no logprobs: graphs with drafts
        answers.append([output.token_ids for output in outputs])
        stats = llm.stats()
        assert stats.num_accepted_draft_tokens > 0
        assert stats.num_used_blocks == 0
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]


@pytest.mark.parametrize("follows", [False, True], ids=["waits", "follows"])
def test_drafts_that_the_device_alone_knows_stand_as_on_the_cpu(
    gpu: devices.Device, follows: bool
) -> None:
    """Behind verifications too, as long as spans have as many: until a block or the text ends."""
    drafts: dict[str, Any] = {
        "speculate_method": "draft_model",
        "draft_model_name_or_path": str(GOLDEN / "llama_mha"),
        "speculate_max_draft_token_num": 5,
        "speculate_max_candidate_len": 10,
    }
    prompts = golden("llama_gqa")["prompts"][:3]
    length, num_compared = (46, 34) if follows else (60, 60)
    sizes = {"batch_size": 3, "max_length": 200, **({"block_size": 64} if follows else {})}
    params = SamplingParams(temperature=1.0, max_new_tokens=length, seed=4, ignore_eos=True)
    answers, shares = [], []
    for settings in (
        {"device": "cpu"},
        SETTINGS,
        {**SETTINGS, "speculate_max_candidate_len": None},
    ):
        llm = LLM(config("llama_gqa", **{**drafts, **settings, **sizes}))
        with_fixed_drafts(llm)
        if not follows:
            assert isinstance(llm.engine.speculation.proposer, DraftModelProposer)
            llm.engine.speculation.proposer.propose_behind = None
        outputs = llm.generate(prompts, params)
        answers.append([output.token_ids[:num_compared] for output in outputs])
        stats = llm.stats()
        shares.append(stats.num_accepted_draft_tokens / stats.num_draft_tokens)
    assert answers[0] == answers[1]
    assert follows or shares[0] == shares[1]
    assert min(shares[:2]) > shares[2]
