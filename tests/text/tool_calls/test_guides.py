"""Guides of tool calls, compiled by llguidance: they take published answers and refuse others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from predict.errors import UserError
from predict.guide import MAX_GRAMMAR_BYTES, Guide
from predict.text.reasoning import FORMATS as REASONING
from predict.text.tool_calls import (
    GuideContext,
    Tool,
    ToolUse,
    content_guide,
    format_of,
    known_formats,
)
from tests.support.tool_guides import takes, tokenizer_of
from tests.text.tool_calls.published import (
    ALL,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM45,
    HERMES,
    KIMI,
    LLAMA,
    MINIMAX,
    MISTRAL,
    MISTRAL_NAMED,
    NOW,
    QWEN3_CODER,
    USE,
    WEATHER,
    Published,
)

FORCED = ToolUse(tools=(WEATHER, NOW), choice="required")
REASONING_MARKS = [mark for row in REASONING.values() for mark in row.kept_tokens]


def guide_for(
    name: str,
    use: ToolUse,
    tokens: Sequence[str] = (),
    thoughts: str | None = None,
    is_thinking: bool = False,
) -> Guide | None:
    ids = tokenizer_of(tuple(tokens), True)[0].ids
    row = None if thoughts is None else REASONING[thoughts]
    return format_of(name).guide(use, GuideContext(ids.get, row, is_thinking))


def tokens_of(case: Published) -> tuple[str, ...]:
    """The marks of a case's format that are tokens where the case was written."""
    marks = format_of(case.format).kept_tokens
    if case in MISTRAL:
        return ("[TOOL_CALLS]",)
    if "</tool_call>[" in case.text:  # within an argument, where no special token may be
        return ("<tool_call>",)
    return marks


def written(case: Published) -> str:
    """A case's text without the token that ends it."""
    return case.text.removesuffix("<|call|>").removesuffix("<|return|>")


VALID = [case for case in ALL if case.valid]


@pytest.mark.parametrize(
    ("case", "tokens"),
    [
        (case, tokens)
        for case in VALID
        for tokens in ("special", "ordinary", "text")
        if case not in MISTRAL_NAMED or tokens != "text"  # which is known by its token [ARGS]
    ],
)
def test_published_answers_are_taken(case: Published, tokens: str) -> None:
    """Marks may be special tokens of the vocabulary, tokens like all others, or none."""
    marks = () if tokens == "text" else tokens_of(case)
    guide = guide_for(case.format, USE, marks)
    assert takes(guide, written(case), marks, tokens == "special")


@pytest.mark.parametrize("case", VALID)
def test_forced_calls_are_taken_and_nothing_else(case: Published) -> None:
    marks = tokens_of(case)
    guide = guide_for(case.format, FORCED, marks)
    bare = case.content is None or case.format == "harmony"
    assert takes(guide, written(case), marks) == bool(case.calls and bare)
    assert not takes(guide, "No.", marks)
    assert not takes(guide, "", marks)


@pytest.mark.parametrize("case", [case for case in VALID if case.calls])
def test_broken_calls_are_refused(case: Published) -> None:
    marks = tokens_of(case)
    guide = guide_for(case.format, USE, marks)
    for good, bad in [
        (case.calls[0][0], "unknown"),
        (case.calls[0][1], '{"city": 1}'),
        (case.calls[0][1], '{"city": "Berlin", "unit": "kelvin"}'),
        (case.calls[0][1], '{"city": "Berlin", "other": 1}'),
        (case.calls[0][1], '{"city": "Berlin"'),
        (case.calls[0][1], "Berlin"),
    ]:
        if good not in case.text or (case.calls[0][0] == "now" and bad.startswith("{")):
            continue  # now takes any object
        text = written(case).replace(good, bad, 1)
        assert not takes(guide, text, marks), text


@pytest.mark.parametrize("case", [*HERMES[:3], *LLAMA[:3], *MISTRAL[:1], *MISTRAL_NAMED])
def test_without_parallel_calls_a_second_is_refused(case: Published) -> None:
    marks = tokens_of(case)
    for choice in ("auto", "required"):
        use = ToolUse(tools=USE.tools, choice=choice, parallel=False)
        if choice == "required" and case.content:
            continue
        guide = guide_for(case.format, use, marks)
        assert takes(guide, case.text, marks) == (len(case.calls) == 1)


@pytest.mark.parametrize("name", known_formats())
def test_a_named_tool_is_the_only_one_and_called_once(name: str) -> None:
    use = ToolUse(tools=USE.tools, named="now")
    marks = format_of(name).kept_tokens
    guide = guide_for(name, use, marks)
    for case in VALID:
        if case.format == name and not case.content and case not in MISTRAL:
            alone = bool(case.calls) and {called[0] for called in case.calls} == {"now"}
            assert takes(guide, written(case), marks) == (alone and len(case.calls) == 1)


@pytest.mark.parametrize("name", known_formats())
def test_no_tools_and_the_choice_of_none_ask_for_nothing(name: str) -> None:
    context = GuideContext(lambda _: None)
    assert format_of(name).guide(ToolUse(), context) is None
    assert format_of(name).guide(ToolUse(tools=(NOW,), choice="none"), context) is None


@pytest.mark.parametrize("name", known_formats())
def test_text_without_calls_is_free(name: str) -> None:
    marks = format_of(name).kept_tokens
    text = "Das ist <b>frei</b>.\n\n``` {} [1]"
    if name == "harmony":
        text = f"<|channel|>final<|message|>{text}"
    assert takes(guide_for(name, USE, marks), text, marks)


@pytest.mark.parametrize(
    "case",
    [
        HERMES[0],
        LLAMA[0],
        MISTRAL[0],
        DEEPSEEK_V3[0],
        DEEPSEEK_V31[0],
        GLM45[0],
        MINIMAX[0],
        KIMI[0],
    ],
)
@pytest.mark.parametrize("thoughts", REASONING)
@pytest.mark.parametrize("special", [True, False])
def test_thoughts_come_ahead_of_calls(case: Published, thoughts: str, special: bool) -> None:
    row = REASONING[thoughts]
    marks = (*tokens_of(case), *row.kept_tokens)
    call = case.text.removeprefix(case.content or "").lstrip()
    thought = f"Hmm {{}}.{row.end}\n\n"
    for use in (USE, FORCED):
        opened = guide_for(case.format, use, marks, thoughts, is_thinking=True)
        assert takes(opened, thought + call, marks, special)
        closed = guide_for(case.format, use, marks, thoughts, is_thinking=False)
        assert takes(closed, row.begin + thought + call, marks, special)
        assert takes(closed, call, marks, special)
    assert not takes(guide_for(case.format, FORCED, marks, thoughts, True), call, marks, special)


TAG = {
    "structures": [{"begin": "<x>", "schema": {"type": "integer"}, "end": "</x>"}],
    "triggers": ["<x>"],
    "at_least_one": True,
    "stop_after_first": True,
}
CONTENTS = [
    (Guide(json_schema={"type": "integer"}), "17", '"17"'),
    (Guide(json_schema=True), "[1, 2]", "[1,2]"),
    (
        Guide(json_schema={"type": "object", "properties": {"name": {}}}),
        '{"name": 1}',
        '{"name":  1}',
    ),
    (Guide(json_object=True), '{"a": 1}', "[1]"),
    (Guide(choice=("yes", 'n"o')), 'n"o', "no"),
    (Guide(regex="[0-9]{3}|a/b"), "a/b", "12"),
    (Guide(grammar='start: rule_0 "!"\nrule_0: /[a-z]+/\nTEXT: "x"'), "hi!", "hi"),
    (Guide(structural_tag=TAG), "so <x>1</x>", "so <x>a</x>"),
]


@pytest.mark.parametrize(("guide", "good", "bad"), CONTENTS)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("is_thinking", [True, False])
def test_thoughts_come_ahead_of_guided_content(
    guide: Guide, good: str, bad: str, special: bool, is_thinking: bool
) -> None:
    row = REASONING["think"]
    ids = tokenizer_of(row.kept_tokens, special)[0].ids
    made = content_guide(None, guide, GuideContext(ids.get, row, is_thinking), ToolUse())
    assert made is not None
    begin = "" if is_thinking else row.begin
    is_free = guide.structural_tag is not None  # text may stand ahead of tags
    for text, is_taken in ((good, True), (bad, False), (f"\n\n\n{good}", is_free)):
        answer = f"{begin}Hm {bad}.</think>\n\n{text}"
        assert takes(made, answer, row.kept_tokens, special) == is_taken, answer
    assert takes(guide, good)
    assert not takes(guide, bad)
    assert takes(made, good, row.kept_tokens, special) != is_thinking
    assert content_guide(None, guide, GuideContext(ids.get), ToolUse()) is guide
    assert made is not None
    assert content_guide(None, made, GuideContext(ids.get, row), ToolUse()) is made


@pytest.mark.parametrize(("guide", "good", "bad"), CONTENTS)
def test_guided_content_stands_in_harmonys_final_message(guide: Guide, good: str, bad: str) -> None:
    row = format_of("harmony")
    ids = tokenizer_of(row.kept_tokens, True)[0].ids
    made = content_guide(row, guide, GuideContext(ids.get), ToolUse())
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    assert takes(made, thought + final + good, row.kept_tokens)
    assert takes(made, final + good, row.kept_tokens)
    assert not takes(made, final + bad, row.kept_tokens)
    assert not takes(made, good, row.kept_tokens)


@pytest.mark.parametrize(("guide", "good", "bad"), CONTENTS)
@pytest.mark.parametrize("case", {case.format: case for case in VALID if case.calls}.values())
def test_beside_tools_an_answer_calls_or_has_the_form(
    case: Published, guide: Guide, good: str, bad: str
) -> None:
    row, marks = format_of(case.format), tokens_of(case)
    context = GuideContext(tokenizer_of(marks, True)[0].ids.get)
    made = content_guide(row, guide, context, USE)
    head = "<|channel|>final<|message|>" if case.format == "harmony" else ""
    assert takes(made, head + good, marks)
    assert not takes(made, head + bad, marks)
    assert not takes(made, "No.", marks)
    if case.content is None or head:
        assert takes(made, written(case), marks)
    forced = content_guide(row, guide, context, FORCED)
    assert not takes(forced, head + good, marks)
    assert made is not None
    with pytest.raises(UserError, match="around says what a whole answer is, and so do tools"):
        content_guide(row, made, context, USE)


@pytest.mark.parametrize("case", [*QWEN3_CODER, *GLM45, *MINIMAX])
def test_a_value_that_would_be_read_as_two_is_refused(case: Published) -> None:
    guide = guide_for(case.format, USE, tokens_of(case))
    for end in ("</parameter>\n", "</arg_value>\n", "\n</parameter>\n", "</arg_value>"):
        text = written(case).replace(end, "\n" if end[-1] == "\n" else "", 1)
        assert text == case.text or not takes(guide, text, tokens_of(case))


def test_texts_that_may_be_null_are_taken_bare() -> None:
    for schema in ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"const": "1"}, {}):
        use = ToolUse(tools=(Tool(name="f", parameters={"properties": {"a": schema}}),))
        call = (
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
        )
        assert takes(guide_for("qwen3_coder", use), call)


REFERRING = {
    "properties": {"at": {"$ref": "#/$defs/place"}},
    "required": ["at"],
    "$defs": {"place": {"type": "object", "properties": {"description": {"type": "integer"}}}},
}


def hermes(arguments: str, name: str = "f") -> str:
    head = f'<tool_call>\n{{"name": "{name}", "arguments": '
    return f"{head}{arguments}}}\n</tool_call>"


def test_a_schema_may_refer_to_itself_and_have_properties_named_as_annotations() -> None:
    guide = guide_for("hermes", ToolUse(tools=(Tool(name="f", parameters=REFERRING),)))
    assert takes(guide, hermes('{"at": {"description": 1}}'))
    assert not takes(guide, hermes('{"at": {"description": "a"}}'))


def test_annotations_take_no_room() -> None:
    parameters = {
        "title": "t" * 1000,
        "properties": {"a": {"description": "d" * 1000, "const": {"title": "kept"}}},
    }
    guide = guide_for("hermes", ToolUse(tools=(Tool(name="f", parameters=parameters),)))
    assert guide is not None
    assert len(guide.text) < 1000
    assert takes(guide, hermes('{"a": {"title": "kept"}}'))
    assert not takes(guide, hermes('{"a": {}}'))


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "string", "pattern": "(?=x)y"}}},
        {"type": "nonsense"},
        {"properties": {"a": {"$ref": "http://127.0.0.1/schema"}}},
    ],
)
def test_a_schema_that_cannot_be_enforced_leaves_any_object(parameters: dict[str, Any]) -> None:
    guide = guide_for("hermes", ToolUse(tools=(Tool(name="f", parameters=parameters),)))
    assert takes(guide, hermes('{"a": [1, {"b": null}]}'))
    assert not takes(guide, hermes("[]"))


def test_what_is_not_known_in_a_schema_is_let_be_unless_it_is_strict() -> None:
    parameters = {"properties": {"a": {"type": "string", "format": "fancy"}}}
    guide = guide_for("hermes", ToolUse(tools=(Tool(name="f", parameters=parameters),)))
    assert takes(guide, hermes('{"a": "b"}'))
    assert not takes(guide, hermes('{"a": 1}'))
    strict = Tool(name="f", parameters=parameters, strict=True)
    with pytest.raises(UserError, match=r"f is strict, .* enforced: Unknown format: fancy"):
        guide_for("hermes", ToolUse(tools=(strict,)))


def test_many_tools_keep_their_names_where_their_schemas_are_too_large() -> None:
    parameters = {"properties": {f"p{i}": {"const": "x" * 100} for i in range(20)}}
    tools = [Tool(name=f"tool{i}", parameters=parameters) for i in range(100)]
    guide = guide_for("hermes", ToolUse(tools=tools))
    assert takes(guide, hermes('{"p0": 1}', "tool99"))
    assert not takes(guide, hermes("{}", "tool100"))
    strict = [Tool(name=f"tool{i}", parameters=parameters, strict=True) for i in range(100)]
    with pytest.raises(UserError, match=f"at most {MAX_GRAMMAR_BYTES}"):
        guide_for("hermes", ToolUse(tools=strict))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "a b"}, "tool name 'a b' is not supported"),
        ({"name": ""}, "tool name '' is not supported"),
        ({"name": 3}, "tool name 3 is not supported"),
        ({"name": "a", "parameters": []}, "parameters of the tool a are a list"),
    ],
)
def test_a_tool_that_is_none_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tool(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"choice": "any"}, "tool_choice 'any' is not known"),
        ({"choice": "required", "tools": ()}, "there are no tools"),
        ({"named": "new"}, "did you mean now"),
        ({"tools": (NOW, NOW)}, "two tools have the name 'now'"),
        ({"tools": [Tool(name=f"t{i}") for i in range(513)]}, "513 tools are too many"),
    ],
)
def test_a_use_of_tools_that_is_none_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ToolUse(**{"tools": (NOW,), **values})


def test_a_schema_that_nests_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100):
        schema = {"items": schema}
    with pytest.raises(UserError, match="nested too deeply"):
        guide_for("hermes", ToolUse(tools=(Tool(name="f", parameters=schema),)))
    assert json.dumps(schema)


@pytest.mark.parametrize(
    ("required", "given", "is_taken"),
    [
        (["b"], 'a=1, b="x", c=[true]', True),
        (["b"], 'b="x"', True),
        (["b"], 'b="x", c=[]', True),
        (["b"], "a=1", False),
        (["b"], "a=1, c=[]", False),
        (["b"], 'a=1 b="x"', False),
        (["b"], 'b="x", ', False),
        (["b"], "b='x'", False),
        (["b"], 'b="x", a=1', False),
        ([], "", True),
        ([], "c=[]", True),
        ([], ", c=[]", False),
        ([], "d=1", False),
    ],
)
def test_parameters_of_olmo_stand_in_the_order_of_the_schema(
    required: list[str], given: str, is_taken: bool
) -> None:
    types = {"a": "integer", "b": "string", "c": "array"}
    properties = {name: {"type": kind} for name, kind in types.items()}
    tool = Tool(name="f", parameters={"properties": properties, "required": required})
    guide = guide_for("olmo3", ToolUse(tools=(tool,)))
    assert takes(guide, f"<function_calls>f({given})</function_calls>") == is_taken
