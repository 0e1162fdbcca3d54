"""1,000 guided answers of the demo model, over bounded schemas of every kind."""

from __future__ import annotations

import json
from collections import Counter

import jsonschema
import pytest

from predict import LLM, SamplingParams
from predict.device import library
from predict.guide import Guide
from tests.support.bounded_schemas import BOUNDED, HARD
from tests.support.guides import PROMPTS, accepts, settings

MAX_NEW_TOKENS = 160


@pytest.fixture(scope="module")
def llm(compiled: library.Library) -> LLM:
    return LLM(**settings(max_length=256, batch_size=32))


def validate(text: str, schema: object) -> None:
    value = json.loads(text)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(value)


def check_answers(llm: LLM, num_requests: int) -> None:
    names = [list(BOUNDED)[index % len(BOUNDED)] for index in range(num_requests)]
    params = [
        SamplingParams(
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=(0.0, 0.7, 1.0)[index % 3],
            top_p=(1.0, 0.9)[index % 2],
            seed=index,
            guide=Guide(json_schema=BOUNDED[name]),
        )
        for index, name in enumerate(names)
    ]
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(num_requests)]
    outputs = llm.generate(prompts, params)
    cut: Counter[str] = Counter()
    for name, output in zip(names, outputs, strict=True):
        if output.finish_reason == "stop":
            validate(output.text, BOUNDED[name])
        else:
            assert output.finish_reason == "length", (name, output.outputs[0].error)
            assert accepts(llm, json.dumps(BOUNDED[name]), output.token_ids)
            cut[name] += 1
    assert sum(cut.values()) <= num_requests / 100, cut


def test_each_schema_holds(llm: LLM) -> None:
    assert len(BOUNDED) >= 25
    check_answers(llm, 3 * len(BOUNDED))


@pytest.mark.slow
def test_a_thousand_answers_hold(llm: LLM) -> None:
    check_answers(llm, 1000)


@pytest.mark.parametrize("name", HARD)
def test_hard_schemas_hold_or_are_refused_by_name(llm: LLM, name: str) -> None:
    schema = HARD[name]
    params = [
        SamplingParams(
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=0.8,
            seed=seed,
            guide=Guide(json_schema=schema, strict=True),
        )
        for seed in range(4)
    ]
    for output in llm.generate([PROMPTS[0]] * 4, params):
        if output.finish_reason == "error":
            assert "guide.json_schema cannot be compiled: " in str(output.outputs[0].error)
        elif output.finish_reason == "stop":
            validate(output.text, schema)
        else:
            assert accepts(llm, json.dumps(schema), output.token_ids)
