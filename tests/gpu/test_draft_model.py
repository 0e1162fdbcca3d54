"""A draft model on the GPU: its tokens reach the step that verifies them without the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.device import cuda, devices
from predict.engine.request_state import Request
from predict.engine.runner.gpu import GpuRunner
from predict.engine.runner.transport import Shelf
from predict.speculative.draft_model import DraftModelProposer
from tests.support.drafts import Generous
from tests.support.golden import GOLDEN, config, golden
from tests.support.gpu_engines import FORMS, SETTINGS, met_traffic
from tests.support.paths import DEMO

DRAFTS: dict[str, Any] = {
    "speculate_method": "draft_model",
    "speculate_max_draft_token_num": 5,
    "draft_model_name_or_path": str(GOLDEN / "llama_gqa"),
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 11},
    "min_p": {"temperature": 0.7, "min_p": 0.1, "typical_p": 0.9, "seed": 5},
    "penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    "ngrams": {"temperature": 0.9, "seed": 2, "no_repeat_ngram_size": 2},
    "bans": {"temperature": 0.0, "bad_words": [[5], [7, 9]], "logit_bias": {17: 1.5}},
    "min_length": {"temperature": 0.0, "min_length": 12, "stop_token_ids": tuple(range(0, 211, 2))},
    "logprobs": {"temperature": 0.0, "logprobs": 3, "repetition_penalty": 1.1},
}
COMPOSITIONS: dict[str, dict[str, Any]] = {
    "alone": {"batch_size": 1},
    "together": {"batch_size": 4},
    "preempted": {"batch_size": 4, "num_cache_blocks": 11},
    "chunks": {"batch_size": 4, "max_num_batched_tokens": 16},
    "no_prefix_cache": {"batch_size": 3, "prefix_caching": False},
    "turns": {"batch_size": 4, "attention": "block"},
}


def drafting(llm: LLM) -> LLM:
    """With drafts whatever they cost: the draft model is as large as the target."""
    config = llm.config
    rows = config.scheduling.batch_size * config.speculation.speculate_max_draft_token_num
    llm.engine.speculation.policy = Generous(
        config.speculation.speculate_max_draft_token_num, rows, looks_up=False
    )
    return llm


def parts(llm: LLM) -> tuple[GpuRunner, DraftModelProposer, GpuRunner]:
    """The target's runner, the proposer, the draft's runner."""
    runner, proposer = llm.engine.runner, llm.engine.speculation.proposer
    assert isinstance(runner, GpuRunner)
    assert isinstance(proposer, DraftModelProposer)
    own = proposer.network.runner
    assert isinstance(own, GpuRunner)
    return runner, proposer, own


def settings(**changes: Any) -> dict[str, Any]:
    return {
        **SETTINGS,
        "block_size": 16,
        "max_length": 160,
        "max_num_batched_tokens": 256,
        **changes,
    }


def texts(llm: LLM, prompts: list[list[int]], params: Any) -> list[tuple[int, ...]]:
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_text_is_the_same_with_a_draft_model(gpu: devices.Device, composition: str) -> None:
    """All kinds of requests in one batch, of which many are right and many are wrong."""
    prompts = [prompt for prompt in golden("llama_gqa")["prompts"] for _ in range(2)]
    kinds = list(KINDS.values())
    params = [
        SamplingParams(max_new_tokens=40 + index, ignore_eos=True, **kinds[index % len(kinds)])
        for index in range(len(prompts))
    ]
    changes = settings(**COMPOSITIONS[composition])
    expected = texts(LLM(config("llama_gqa", **changes)), prompts, params)
    llm = drafting(LLM(config("llama_gqa", **changes, **DRAFTS)))
    assert texts(llm, prompts, params) == expected
    stats = llm.stats()
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert any(shape.follows for shape in parts(llm)[2].graphs)
    assert stats.num_used_blocks == 0
    assert (stats.num_preemptions > 0) == (composition == "preempted")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("draft", ["qwen2", "mistral_window", "llama_gqa"])
def test_goldens_with_drafts_of_other_families(gpu: devices.Device, draft: str, form: str) -> None:
    expected = golden("llama_gqa")
    changes = {**DRAFTS, "draft_model_name_or_path": str(GOLDEN / draft)}
    llm = drafting(FORMS[form](LLM(config("llama_gqa", **settings(batch_size=3), **changes))))
    if form == "eager":
        parts(llm)[2].graphs.pool = None
    params = SamplingParams(max_new_tokens=len(expected["greedy"][0]), temperature=0.0)
    assert [list(ids) for ids in texts(llm, expected["prompts"], params)] == expected["greedy"]
    assert llm.stats().num_draft_tokens > 0


def test_the_host_waits_once_per_step_and_the_device_for_nothing(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for the drafts; and the next ones run when it learns how a verification ended."""
    llm = drafting(LLM(config("llama_gqa", **settings(batch_size=1), **DRAFTS)))
    prompt = golden("llama_gqa")["prompts"][0]
    params = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    texts(llm, [prompt], params)  # records the graphs
    runner, _, own = parts(llm)
    assert isinstance(own._outlet, Shelf)
    waits: list[cuda.Event] = []
    synchronize = cuda.Event.synchronize
    launch_behind, followed = GpuRunner.launch_behind, list[int]()

    def counted(*arguments: Any) -> Any:
        followed.append(arguments[-1])
        return launch_behind(*arguments)

    monkeypatch.setattr(GpuRunner, "launch_behind", counted)

    def waited(event: cuda.Event) -> None:
        waits.append(event)
        synchronize(event)

    monkeypatch.setattr(cuda.Event, "synchronize", waited)
    llm.engine.add(Request(99, prompt, params))
    steps = 0
    while llm.engine.step()[0] is not None:
        steps += 1
    assert llm.stats().num_draft_spans > 4
    for_inputs = (runner._copied, own._copied)
    assert sum(event not in for_inputs for event in waits) == steps
    assert steps < 60
    assert sum(num_chosen == 2 for num_chosen in followed) > steps // 2


@pytest.mark.parametrize("form", ["graph", "eager"])
def test_drafts_that_cannot_be_drawn_change_nothing(gpu: devices.Device, form: str) -> None:
    import paddle

    expected = golden("llama_gqa")
    llm = drafting(LLM(config("llama_gqa", **settings(batch_size=3), **DRAFTS)))
    _, _, own = parts(llm)
    forward, calls = own.network.forward, [0]
    if form == "eager":
        own.graphs.pool = None
    place = gpu.place()
    nans = paddle.to_tensor(np.full(8 * llm.spec.vocab_size, np.nan, np.float32), place=place)

    def failing(*given: Any) -> Any:
        """Of every third step, or where they are recorded, of all."""
        outputs = forward(*given)
        logits: Any = outputs.logits
        calls[0] += 1
        if logits is not None and (form == "graph" or calls[0] % 3 == 0):
            stream = cuda.current_stream(gpu)
            cuda.copy_bytes(logits.data_ptr(), nans.data_ptr(), 4 * logits.size, stream)
        return outputs

    own.network.forward = failing  # type: ignore[assignment]
    params = SamplingParams(max_new_tokens=len(expected["greedy"][0]), temperature=0.0)
    assert [list(ids) for ids in texts(llm, expected["prompts"], params)] == expected["greedy"]
    stats = llm.stats()
    assert (stats.num_draft_tokens > 0) == (form == "eager")
    assert stats.num_used_blocks == 0


def test_aborts_amid_drafts_lose_no_block_and_change_no_text(gpu: devices.Device) -> None:
    changes = settings(batch_size=4, num_cache_blocks=14)
    generator = np.random.default_rng(0)
    shared = generator.integers(3, 190, 20).tolist()
    prompts = [shared + generator.integers(3, 190, n).tolist() for n in (1, 5, 12, 17, 30, 2)]
    greedy = SamplingParams(max_new_tokens=60, temperature=0.0, ignore_eos=True)
    plain = LLM(config("llama_gqa", **changes))
    wanted = [list(ids) for ids in texts(plain, prompts, greedy)]
    llm = drafting(LLM(config("llama_gqa", **changes, **DRAFTS)))
    met_traffic(llm, prompts, wanted, num_requests=60, most_at_once=1, seed=0)
    assert llm.engine.stats.num_accepted_draft_tokens > 50


def test_a_smaller_draft_of_the_demo_model_agrees_often(gpu: devices.Device) -> None:
    """The same weights rounded: what is accepted says that drafts read a right cache."""
    prompts = ["def add(a, b):\n    return", "import os\nimport sys\n", "class Stack:\n    def"]
    base = {**SETTINGS, "max_length": 256, "batch_size": 3, "max_num_batched_tokens": 256}
    params = SamplingParams(max_new_tokens=48, temperature=0.0, ignore_eos=True)
    llm = drafting(LLM(config(DEMO, **base, **{**DRAFTS, "draft_model_name_or_path": str(DEMO)})))
    plain = LLM(config(DEMO, **base))
    assert [o.token_ids for o in llm.generate(prompts, params)] == [
        o.token_ids for o in plain.generate(prompts, params)
    ]
    stats = llm.stats()
    assert stats.num_accepted_draft_tokens > 0.98 * stats.num_draft_tokens > 0
