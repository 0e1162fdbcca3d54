"""Adapters of requests: the same answers as of merged ones, whoever else is in the batch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.llm import LLM
from predict.request import RequestOutput, SamplingParams
from tests.support import tiny
from tests.support.adapters import SEVEN, write_seven

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12, ignore_eos=True, logprobs=3)
PROMPTS = [[5, 9, 11, 30], [5, 9, 11, 30, 7, 8], [101, 3], [77], [14, 15, 16, 17, 18], [60, 61]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_seven(tmp_path_factory.mktemp("adapters"), tiny.CONFIG)


def serving(model: Path, folders: dict[str, Path], **settings: Any) -> LLM:
    modules = tuple(f"{name}={path}" for name, path in folders.items())
    return LLM(
        model,
        **{
            "dtype": "float32",
            "inference_model": True,
            "attention": "append",
            "lora_modules": modules,
            "max_lora_rank": 64,
            "max_length": 64,
            "batch_size": 8,
            **settings,
        },
    )


def answers(llm: LLM, adapters: list[str | None], prompts: Any = None) -> list[RequestOutput]:
    prompts = prompts or [PROMPTS[index % len(PROMPTS)] for index in range(len(adapters))]
    return llm.generate(prompts, [replace(GREEDY, adapter=name) for name in adapters])


def logits_of(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Any]]:
    """By request, in order of arrival: the logits of each of its steps, as they are drawn from."""
    found: dict[int, list[Any]] = {}
    chooser: Any = llm.engine.runner.chooser  # type: ignore[attr-defined]
    sampler, drawn = llm.engine.sampler, list[Any]()
    choices, tokens = sampler.choices, chooser.tokens

    def noted(rows: Any, *given: Any) -> Any:
        drawn[:] = rows
        return choices(rows, *given)

    def recorded(logits: Any, *given: Any) -> Any:
        for row, values in zip(drawn, logits.numpy(), strict=False):
            found.setdefault(row.request.request_id, []).append(values.copy())
        return tokens(logits, *given)

    monkeypatch.setattr(sampler, "choices", noted)
    monkeypatch.setattr(chooser, "tokens", recorded)
    return found


def steps(output: RequestOutput) -> Any:
    (answer,) = output.outputs
    assert answer.logprobs is not None
    return [{token: each.logprob for token, each in step.items()} for step in answer.logprobs]


@pytest.mark.parametrize("inference_model", [True, False])
@pytest.mark.parametrize("name", SEVEN)
def test_an_adapter_answers_as_the_model_with_it_merged(
    tiny_model: Path, folders: dict[str, Path], name: str, inference_model: bool
) -> None:
    llm = serving(tiny_model, {name: folders[name]}, inference_model=inference_model)
    reference: dict[str, Any] = {"dtype": "float32", "max_length": 64, "batch_size": 8}
    reference["inference_model"] = False
    merged = LLM(tiny_model, lora_path=folders[name], **reference)
    base = LLM(tiny_model, **reference)
    ours = answers(llm, [name] * 3)
    theirs = merged.generate(PROMPTS[:3], GREEDY)
    plain = base.generate(PROMPTS[:3], GREEDY)
    for one, other, without in zip(ours, theirs, plain, strict=True):
        tokens = one.outputs[0].token_ids
        assert tokens == other.outputs[0].token_ids != without.outputs[0].token_ids
        for step, wanted in zip(steps(one), steps(other), strict=True):
            assert step == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("quant_type", [None, "weight_only_int8", "weight_only_int4", "a8w8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_batch_gives_each_what_it_has_alone(
    tiny_model: Path,
    folders: dict[str, Path],
    dtype: str,
    quant_type: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = serving(tiny_model, folders, dtype=dtype, quant_type=quant_type, prefix_caching=False)
    logits = logits_of(llm, monkeypatch)
    names = [None, *SEVEN]
    answers(llm, names)
    together = list(logits.values())
    assert len(together) == len(names) == llm.config.scheduling.batch_size
    for index, name in enumerate(names):
        logits.clear()
        answers(llm, [name], [PROMPTS[index % len(PROMPTS)]])
        (alone,) = logits.values()
        np.testing.assert_array_equal(alone, together[index])
    without = serving(tiny_model, {}, dtype=dtype, quant_type=quant_type)
    plain = logits_of(without, monkeypatch)
    without.generate(PROMPTS[:1], GREEDY)
    np.testing.assert_array_equal(next(iter(plain.values())), together[0])
