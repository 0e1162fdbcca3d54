"""Guides of every kind, requests that have them, and what their answers must be."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import llguidance

from predict import LLM, SamplingParams
from predict.guide import Guide
from predict.request import RequestOutput
from predict.text.lark import JSON_STYLE
from tests.support.paths import DEMO

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blau"]}, "maxItems": 3},
    },
    "required": ["first_name", "age", "tags"],
    "additionalProperties": False,
}
TAG = {
    "structures": [{"begin": "\n    return <x>", "schema": {"const": [1, "é"]}, "end": "</x>"}],
    "triggers": ["\n    return"],
    "at_least_one": True,
    "stop_after_first": True,
}
# Name -> the guide, and what its text must be.
GUIDES: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json_schema": (
        {"json_schema": PERSON},
        lambda text: jsonschema.validate(json.loads(text), PERSON),
    ),
    "regex": ({"regex": "[a-f]{3,9}-[0-9]{2}"}, lambda text: _matches("[a-f]{3,9}-[0-9]{2}", text)),
    "choice": (
        {"choice": ["a é 🙂", "while True:", "whi"]},
        lambda text: _is_in(text, ["a é 🙂", "while True:", "whi"]),
    ),
    "grammar": (
        {"grammar": 'start: "x" item{2,4}\nitem: " " /[0-9]{1,3}/\n'},
        lambda text: _matches(r"x( [0-9]{1,3}){2,4}", text),
    ),
    "structural_tag": (
        {"structural_tag": TAG},
        lambda text: _matches(r'(.|\n)*\n    return <x>\[1, "é"\]</x>', text),
    ),
}
PROMPTS = ["def gcd(a, b):", "import os\nimport sys\n\nimport os\nimport", "class Stack:\n    def"]


def _matches(pattern: str, text: str) -> None:
    assert re.fullmatch(pattern, text), text


def _is_in(text: str, allowed: Sequence[str]) -> None:
    assert text in allowed


def requests() -> list[tuple[str, SamplingParams, Callable[[str], Any] | None]]:
    """Prompts with guides, greedy and sampled, beside some without."""
    made: list[tuple[str, SamplingParams, Callable[[str], Any] | None]] = []
    for index, (guide, check) in enumerate(GUIDES.values()):
        prompt = PROMPTS[index % len(PROMPTS)]
        guided = SamplingParams(max_new_tokens=64, temperature=0.0, guide=Guide(**guide))
        made.append((prompt, guided, check))
        sampled = replace(guided, temperature=0.9, top_p=0.95, seed=index, repetition_penalty=1.05)
        made.append((prompt, sampled, check))
        made.append((prompt, SamplingParams(max_new_tokens=12, temperature=0.0), None))
    made.append((PROMPTS[0], replace(made[0][1], temperature=1.0, seed=3, n=3, logprobs=2), None))
    return made


def settings(**changes: Any) -> dict[str, Any]:
    return {
        "model": str(DEMO),
        "dtype": "float32",
        "max_length": 192,
        "block_size": 16,
        "batch_size": 6,
        "inference_model": True,
        "attention": "append",
        **changes,
    }


def answers(llm: LLM) -> list[RequestOutput]:
    """Of all requests together; their texts are checked, and nothing is left behind."""
    prompts, params, checks = zip(*requests(), strict=True)
    outputs = llm.generate(list(prompts), list(params))
    for output, check in zip(outputs, checks, strict=True):
        if check is not None and output.finish_reason == "stop":
            check(output.text)
        elif check is not None:
            assert output.finish_reason == "length", output.outputs[0].error
    assert llm.stats().num_used_blocks == 0
    return outputs


def tokens(outputs: Sequence[RequestOutput]) -> list[list[tuple[int, ...]]]:
    return [[each.token_ids for each in output.outputs] for output in outputs]


def accepts(llm: LLM, guide: str, token_ids: Sequence[int]) -> bool:
    """Whether the tokens are a beginning that a JSON schema's grammar allows."""
    assert llm.tokenizer is not None
    known = llguidance.LLTokenizer(
        llm.tokenizer.for_guides(1), n_vocab=llm.spec.vocab_size, eos_token=[1]
    )
    grammar = llguidance.LLMatcher.grammar_from_json_schema(guide, JSON_STYLE)
    matcher = llguidance.LLMatcher(known, grammar)
    return matcher.consume_tokens(list(token_ids))
