"""TopP + window verification on the GPU: drafts stand as predict.engine.window says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from predict.engine.choices import GREEDY, Choice, Row
from predict.engine.draft_policy import Costs, DraftPolicy
from predict.engine.gpu_runner import sampling_shapes, write_choices
from predict.engine.request_state import Request
from predict.engine.window import WindowVerifier, loose_drafts
from predict.ops import compiled as ops
from predict.speculative.draft_model import DraftModelProposer
from tests.support.golden import GOLDEN, config, golden
from tests.support.gpu_engines import SETTINGS, answer_config, without_graphs
from tests.support.gpu_operands import Operands


class Spans(NamedTuple):
    """Rows of logits of some requests, with the network's input and what the sampler drew."""

    logits: npt.NDArray[np.float32]
    rows: list[Row]
    choices: list[Choice]
    token_ids: npt.NDArray[np.int32]
    logit_indices: npt.NDArray[np.int32]
    drawn: npt.NDArray[np.int32]


def random_spans(generator: np.random.Generator, vocab: int, num_spans: int) -> Spans:
    """Likely drafts and unlikely ones, of requests of all kinds; some have only a last row."""
    rows: list[Row] = []
    choices: list[Choice] = []
    tokens: list[int] = []
    logits, indices, drawn = [], [], []
    for number in range(num_spans):
        num_drafts = int(generator.choice([0, 1, 3, 8, 15], p=[0.1, 0.2, 0.3, 0.3, 0.1]))
        own = generator.normal(0, 2, (num_drafts + 1, vocab)).astype(np.float32)
        if number % 3 == 0:
            own = np.round(own)  # ties
        if number % 4 == 1:
            own[:, :: generator.integers(2, 5)] = -np.inf
        ordered = np.argsort(-own, axis=1, kind="stable")
        ranks = np.minimum(generator.choice([0, 0, 1, 1, 2, 4, 9, 30], num_drafts), vocab - 1)
        drafts = ordered[np.arange(num_drafts), ranks].astype(np.int32)
        if number % 7 == 2 and num_drafts:
            drafts[-1] = -1  # a draft model could not draw one
        chosen = ordered[np.arange(num_drafts + 1), generator.choice([0, 1, 2], num_drafts + 1)]
        chosen = np.where(generator.random(num_drafts + 1) < 0.02, -1, chosen)
        choice = Choice(
            float(generator.choice([0.25, 0.5, 1.0, 2.0])),
            int(generator.choice([0, 0, 2, 3, 5, 50, 3 * vocab])),
            float(generator.choice([0.3, 0.7, 0.95, 1.0])),
            *(0, 0, float(generator.choice([0.0, 0.0, 0.05, 0.4]))),
        )
        if number % 10 == 4:
            choice = GREEDY
        elif number % 10 == 7:
            choice = choice._replace(typical_p=0.5)
        tokens += [0] * int(generator.integers(0, 3))  # of a prompt's chunk, say
        start = len(tokens)
        tokens += [9, *drafts.tolist()]
        request = Request(number, [1], SamplingParams(temperature=0.5))
        rows += [Row(request, drafts[:i].tolist()) for i in range(num_drafts + 1)]
        choices += [choice] * (num_drafts + 1)
        logits.append(own)
        indices.append(np.arange(start, start + num_drafts + 1))
        drawn.append(chosen)
    return Spans(
        np.concatenate(logits),
        rows,
        choices,
        np.array(tokens, np.int32),
        np.concatenate(indices).astype(np.int32),
        np.concatenate(drawn).astype(np.int32),
    )


@pytest.mark.parametrize("vocab", [5, 97, 1000, 32_003])
def test_drafts_stand_as_on_the_cpu(gpu: devices.Device, vocab: int) -> None:
    operands = Operands(gpu, "float32")
    generator = np.random.default_rng(vocab)
    num_rows = num_other = num_changed = 0
    for trial in range(6 if vocab > 1000 else 40):
        spans = random_spans(generator, vocab, 12)
        window, most = 1 + trial % 3, 2 + trial % 9
        columns = np.zeros(sampling_shapes(len(spans.rows))[0], np.int32)
        write_choices(columns, spans.choices, loose_drafts(spans.rows, spans.choices))
        wanted = WindowVerifier(window, most).verified(
            spans.drawn.tolist(), spans.logits, spans.rows, spans.choices
        )
        last_tokens = operands.placed(np.concatenate([spans.drawn, [77, 78]]).astype(np.int32))
        ops.verify_window(
            operands.placed(spans.logits),
            operands.placed(columns),
            operands.placed(spans.token_ids),
            operands.placed(spans.logit_indices),
            last_tokens,
            window,
            most,
        )
        got = last_tokens.numpy()
        assert got[-2:].tolist() == [77, 78]
        num_rows += len(wanted)
        num_other += int((got[:-2] != wanted).sum())
        num_changed += int((spans.drawn != wanted).sum())
    assert num_changed > num_rows / 20
    # A sum that reaches top_p exactly may fall either way with another rounding.
    assert num_other <= num_rows / 500


class FixedDrafts(DraftPolicy):
    """As many drafts in every step: the text depends on which drafts there are."""

    def limits(self, requests: Sequence[Request], on_way: bool) -> dict[Request, int]:
        rooms = {r: r.max_num_tokens - r.num_tokens - 1 for r in requests}
        return {r: min(room, self.max_length) for r, room in rooms.items() if room > 0}


def with_fixed_drafts(llm: LLM) -> LLM:
    most = llm.config.speculation.speculate_max_draft_token_num
    llm.engine.policy = FixedDrafts(most, 64, Costs(row=0.0), looks_up=False)
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
            assert isinstance(llm.engine.proposer, DraftModelProposer)
            llm.engine.proposer.propose_behind = None
        outputs = llm.generate(prompts, params)
        answers.append([output.token_ids[:num_compared] for output in outputs])
        stats = llm.stats()
        shares.append(stats.num_accepted_draft_tokens / stats.num_draft_tokens)
    assert answers[0] == answers[1]
    assert follows or shares[0] == shares[1]
    assert min(shares[:2]) > shares[2]
