"""Guided answers on the GPU: the CPU's tokens, in every form, while networks run ahead."""

from __future__ import annotations

import numpy as np
import pytest

from predict import LLM
from predict.device import devices
from tests.support.drafts import METHODS, Generous
from tests.support.gpu_engines import FORMS, runner_of
from tests.support.guides import answers, settings, tokens


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[int, ...]]]:
    return tokens(answers(LLM(**settings(device="cpu"))))


@pytest.mark.parametrize("form", FORMS)
def test_guided_tokens_equal_those_of_the_cpu(
    gpu: devices.Device, expected: list[list[tuple[int, ...]]], form: str
) -> None:
    llm = FORMS[form](LLM(**settings(device="gpu")))
    assert tokens(answers(llm)) == expected
    guided = [shape for shape in runner_of(llm).graphs if shape.guided]
    assert bool(guided) == (form != "eager")


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_guided_token(
    gpu: devices.Device,
    monkeypatch: pytest.MonkeyPatch,
    expected: list[list[tuple[int, ...]]],
    method: str,
) -> None:
    monkeypatch.setattr("predict.drafting.DraftPolicy", Generous)
    chosen = {k: v for k, v in METHODS[method].items() if k != "draft_model_quant_type"}
    llm = LLM(**settings(device="gpu", speculate_method=method, **chosen))
    assert tokens(answers(llm)) == expected
    assert llm.stats().num_accepted_draft_tokens > 0


def test_the_network_runs_ahead_of_masks(
    gpu: devices.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(**settings(device="gpu"))
    depths: list[int] = []
    fill = llm.engine.sampler.masks.fill

    def count(*arguments: object) -> None:
        depths.append(len(llm.engine._steps))
        fill(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.sampler.masks, "fill", count)
    answers(llm)
    # The step that masks are for is queued, but for first steps and those behind all ends.
    assert np.mean(np.array(depths) > 0) > 0.8
