import json
from typing import Any

import numpy as np
import pytest

from predict import guide as guide_config
from predict.errors import UserError
from predict.guide import Guide
from predict.request import SamplingParams

TAG = {"structures": [{"begin": "<f=a>", "schema": {}, "end": "</f>"}], "triggers": ["<f="]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "exactly one of json_schema, json_object, regex"),
        ({"json_object": False}, "guide has nothing"),
        ({"json_object": 1}, "guide.json_object 1 is not supported"),
        ({"regex": "a", "grammar": 'start: "a"'}, "guide has regex, grammar"),
        ({"regex": ""}, "guide.regex '' is not supported"),
        ({"regex": b"a"}, "guide.regex b'a' is not supported"),
        ({"regex": "a\ud800"}, "guide.regex has half a surrogate pair at character 1"),
        ({"regex": "a" * (guide_config.MAX_REGEX_BYTES + 1)}, "guide.regex has 16385 bytes"),
        ({"grammar": "é" * guide_config.MAX_GRAMMAR_BYTES}, "guide.grammar has 131072 bytes"),
        ({"choice": "yes"}, "guide.choice 'yes' is not supported"),
        ({"choice": []}, "at least one"),
        ({"choice": ["yes", 1]}, r"guide.choice\[1\] 1 is not supported"),
        ({"choice": ["y" * 60000, "n" * 60000]}, "guide.choice has 120000 bytes"),
        ({"json_schema": "{"}, "guide.json_schema is not valid JSON at column 2"),
        ({"json_schema": "[]"}, "guide.json_schema is a list"),
        ({"json_schema": 0}, "guide.json_schema is a number"),
        ({"json_schema": {"const": float("nan")}}, "guide.json_schema is no JSON value"),
        ({"json_schema": {"const": np.float32(1)}}, "guide.json_schema is no JSON value"),
        ({"json_schema": {1: 2, "1": 3}}, "guide.json_schema has the key '1' twice"),
        ({"json_schema": {"const": "\ud800"}}, "guide.json_schema has half a surrogate pair"),
        ({"json_schema": '{"const": "\\ud800"}'}, "guide.json_schema"),
        ({"json_schema": {"const": "a" * 300000}}, "guide.json_schema has 300012 bytes as JSON"),
        (
            {"json_schema": {"minimum": 2**53 + 1}, "strict": True},
            "the number 9007199254740993",
        ),
        ({"json_schema": {"const": 2**53 + 1}}, "the number 9007199254740993"),
        ({"json_schema": {}, "strict": 1}, "guide.strict 1 is not supported .allowed: true, false"),
        ({"json_schema": {"enum": [1, [-(10**20)]]}}, "the number -100000000000000000000"),
        (
            {"json_schema": {"properties": dict.fromkeys(map(str, range(1025)), True)}},
            "1025 properties in one object",
        ),
        ({"structural_tag": []}, "guide.structural_tag is a list"),
        ({"structural_tag": {**TAG, "structure": 1}}, "did you mean structures"),
        ({"structural_tag": {**TAG, "triggers": []}}, "guide.structural_tag.triggers is needed"),
        ({"structural_tag": {**TAG, "triggers": [1]}}, r"structural_tag.triggers\[0\] 1 is not"),
        ({"structural_tag": {**TAG, "triggers": ["<g"]}}, "begins with none of the triggers"),
        ({"structural_tag": {**TAG, "at_least_one": 1}}, "structural_tag.at_least_one 1"),
        ({"structural_tag": {**TAG, "structures": [{"begin": "<f="}]}}, "schema is needed"),
    ],
)
def test_a_guide_that_is_none_is_refused_with_its_field(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Guide(**values)


def test_a_schema_that_nests_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(guide_config.MAX_DEPTH + 1):
        schema = {"items": schema}
    with pytest.raises(UserError, match="json_schema"):
        Guide(json_schema=schema)
    with pytest.raises(UserError, match="json_schema"):
        Guide(json_schema="[" * 100000)


def test_a_schema_is_kept_as_text_with_the_order_of_its_keys() -> None:
    schema = {"properties": {"b": {"type": "integer"}, "a": {"const": "ü"}}}
    guide = Guide(json_schema=schema)
    assert guide.json_schema == '{"properties":{"b":{"type":"integer"},"a":{"const":"ü"}}}'
    assert guide == Guide(json_schema=json.dumps(schema, indent=8))
    assert hash(guide) == hash(Guide(json_schema=json.dumps(schema)))
    assert (guide.kind, guide.text) == ("json_schema", guide.json_schema)
    assert Guide(json_schema=False).text == "false"


def test_an_object_describes_a_guide_for_a_request() -> None:
    params = SamplingParams(guide={"choice": ["yes", "no", "yes"]})  # type: ignore[arg-type]
    assert params.guide == Guide(choice=("yes", "no"))
    with pytest.raises(UserError, match="did you mean json_schema"):
        SamplingParams(guide={"jsonschema": {}})  # type: ignore[arg-type]
    with pytest.raises(UserError, match="guide 'yes' is not supported"):
        SamplingParams(guide="yes")  # type: ignore[arg-type]


def test_beams_and_a_guide_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"guide .* is not supported with num_beams 2"):
        SamplingParams(guide=Guide(json_object=True), num_beams=2)
