"""Drafters of hidden states on a GPU: their logits, and text that is that of plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from predict.engine import speculation
from predict.engine.runner.gpu import GpuRunner
from tests.support import drafters, tiny
from tests.support.draft_heads import (
    HEADS,
    KNOWING,
    PROMPT,
    SOME,
    TARGET,
    WORDS,
    recorded,
    settings,
    with_layer,
    write_followed,
    write_knowing,
    written,
)
from tests.support.drafters import Target
from tests.support.drafts import draft_always
from tests.support.golden import GOLDEN

ON_GPU: dict[str, Any] = {"device": "gpu", "inference_model": True}
PLAIN: dict[str, Any] = {"draft_model_name_or_path": None, "speculate_method": None}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_new_tokens=40, ignore_eos=True, seed=3)


def draft_runner(llm: LLM) -> GpuRunner:
    proposer: Any = llm.engine.speculation.proposer
    runner = proposer.drafting.runner
    assert isinstance(runner, GpuRunner)
    return runner


def without_graphs(llm: LLM) -> LLM:
    runner = llm.engine.runner
    assert isinstance(runner, GpuRunner)
    runner.graphs.pool = draft_runner(llm).graphs.pool = None
    return llm


def check_logits(llm: LLM, own: Any, wanted: Any) -> None:
    """Of a draft, of all of the drafter's tokens."""
    ids = draft_runner(llm).chooser.token_ids
    theirs = wanted if ids is None else wanted[ids.numpy()]
    np.testing.assert_allclose(own[0], theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", HEADS)
def test_logits_of_drafts_equal_numpy(gpu: devices.Device, name: str, tmp_path: Path) -> None:
    head, reference = HEADS[name], Target(TARGET)
    target = tiny.write(tmp_path / "target", TARGET)
    folder = written(head, tmp_path / "head")
    llm = without_graphs(LLM(settings(target, folder, head.method, **ON_GPU)))
    draft_always(llm)
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    with recorded(llm) as found:
        llm.generate([PROMPT], params)
    assert len(found) > 2
    for tokens, logits in found[:3]:
        wanted = head.logits(head.tensors(), reference, tokens, len(logits), **head.options)
        for own, theirs in zip(logits, wanted, strict=True):
            check_logits(llm, own, theirs)


@pytest.mark.parametrize("case", drafters.MTP_CASES)
def test_logits_of_a_layer_behind_the_last_equal_transformers(
    gpu: devices.Device, case: str, tmp_path: Path
) -> None:
    last = drafters.MTP_CASES[case]
    folder = with_layer(case, tmp_path / "model", lambda there: drafters.mtp_tensors(there, last))
    llm = without_graphs(LLM(settings(folder, None, "mtp", **ON_GPU)))
    draft_always(llm)
    wanted = np.load(GOLDEN / "mtp.npz")
    params = SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    with recorded(llm) as found:
        llm.generate([drafters.MTP_PROMPT], params)
    tokens, logits = found[0]
    assert tokens[-1] == wanted[f"{case}/tokens"][0]
    for own, theirs in zip(logits, wanted[f"{case}/logits"], strict=True):
        check_logits(llm, own, theirs)


def texts(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("form", ["graph", "eager"])
@pytest.mark.parametrize(("method", "of"), KNOWING)
def test_text_with_drafts_is_the_text_without(
    gpu: devices.Device, method: str, of: str, form: str, tmp_path: Path
) -> None:
    """Greedy and sampled, of heads that are often right; over chunks, preemption and hits."""
    target = write_followed(tmp_path / "model", 1.0)
    folder = write_knowing(tmp_path / "head", method, of)
    more = {**ON_GPU, "num_cache_blocks": 12, "max_num_batched_tokens": 32}
    prompts = [[(7 * i + j * j) % WORDS for j in range(3 + 5 * i)] for i in range(8)]
    params = [GREEDY if index % 2 else SAMPLED for index in range(len(prompts))]
    expected = texts(LLM(settings(target, None, method, **more, **PLAIN)), prompts, params)
    llm = LLM(settings(target, folder, method, **more))
    llm = llm if form == "graph" else without_graphs(llm)
    draft_always(llm)
    for _ in range(2):
        assert texts(llm, prompts, params) == expected
    stats = llm.stats()
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens
    assert stats.num_used_blocks == 0
    assert (draft_runner(llm).num_recorded > 2) == (form == "graph")


@pytest.mark.parametrize(("method", "of"), KNOWING)
def test_a_head_that_knows_what_follows_is_always_right(
    gpu: devices.Device, method: str, of: str, tmp_path: Path
) -> None:
    target = write_followed(tmp_path / "model", 0.0)
    folder = write_knowing(tmp_path / "head", method, of)
    llm = LLM(settings(target, folder, method, **ON_GPU))
    draft_always(llm)
    llm.generate(SOME, GREEDY)
    stats = llm.stats()
    assert stats.num_draft_tokens > 60
    assert stats.num_accepted_draft_tokens == stats.num_draft_tokens


def test_a_reduced_vocabulary_drafts_on_a_gpu_as_on_the_cpu(
    gpu: devices.Device, tmp_path: Path
) -> None:
    head = HEADS["EAGLE-3 of SafeAILab"]
    target, folder = tiny.write(tmp_path / "target", TARGET), written(head, tmp_path / "head")
    found = []
    for more in (ON_GPU, {}):
        llm = LLM(settings(target, folder, head.method, **more))
        draft_always(llm)
        texts(llm, [PROMPT] * 3, [GREEDY, SAMPLED, GREEDY])
        found.append(llm.stats())
    one, other = found
    assert one.num_draft_tokens == other.num_draft_tokens > 0
    assert one.num_accepted_by_position == other.num_accepted_by_position


def test_steps_run_ahead_in_a_pause(
    gpu: devices.Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "MOST_VAIN", 5)
    head = HEADS["EAGLE-3 of SafeAILab"]
    target, folder = tiny.write(tmp_path / "target", TARGET), written(head, tmp_path / "head")
    llm = LLM(settings(target, folder, head.method, **ON_GPU))
    draft_always(llm)
    expected = texts(LLM(settings(target, None, "", **ON_GPU, **PLAIN)), [PROMPT], GREEDY)
    assert texts(llm, [PROMPT], GREEDY) == expected
    assert llm.engine.speculation.taps == ()
    launched: list[int] = []
    launch = GpuRunner.launch

    def counted(runner: GpuRunner, *given: Any) -> Any:
        launched.append(len(llm.engine._steps))
        return launch(runner, *given)

    monkeypatch.setattr(GpuRunner, "launch", counted)
    assert texts(llm, [PROMPT], GREEDY) == expected
    assert launched.count(1) > 30
