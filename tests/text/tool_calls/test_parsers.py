"""Every format's published answers, cut anywhere, and answers that are broken."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from predict.text.deltas import CallArguments, CallBegin, ContentDelta
from predict.text.tool_calls import Tool, ToolUse, format_of, known_formats, parser_of
from tests.text.tool_calls.published import ALL, USE, Published, read_format

PARSER_FILES = ("markup.py", "_json.py", "stop_strings.py", "reasoning.py")
IDS = [f"{case.format}-{index}" for index, case in enumerate(ALL)]


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_a_published_answer_is_read(case: Published) -> None:
    assert read_format(case.format, [case.text]) == case.answer


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_where_an_answer_is_cut_changes_nothing(case: Published) -> None:
    text = case.text
    for at in range(1, len(text)):
        assert read_format(case.format, [text[:at], text[at:]]) == case.answer, at
    assert read_format(case.format, list(text)) == case.answer
    for size in (2, 3, 5):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read_format(case.format, pieces) == case.answer, size


def test_every_format_has_a_published_answer() -> None:
    assert {case.format for case in ALL} == set(known_formats())


@pytest.mark.parametrize("case", ALL, ids=IDS)
def test_an_answer_that_stops_anywhere_is_read_the_same_in_any_pieces(case: Published) -> None:
    for end in range(0, len(case.text), 3):
        text = case.text[:end]
        assert read_format(case.format, list(text)) == read_format(case.format, [text]), end


def test_arguments_come_as_they_are_written() -> None:
    parser = parser_of(format_of("hermes"), USE)
    assert parser.feed('Hi <tool_call>{"name": "now", "argum') == [ContentDelta("Hi")]
    begin, first = parser.feed('ents": {"a')
    assert isinstance(begin, CallBegin)
    assert (begin.index, begin.name) == (0, "now")
    assert first == CallArguments(0, '{"a')
    assert parser.feed('": 1') == [CallArguments(0, '": 1')]
    assert parser.feed("}") == [CallArguments(0, "}")]
    assert parser.feed("}</tool_call>\n") == []
    assert parser.finish() == []


def test_text_that_may_become_markup_is_held_back_and_no_more() -> None:
    parser = parser_of(format_of("hermes"), USE)
    assert parser.feed("a <") == [ContentDelta("a")]
    assert parser.feed("b") == [ContentDelta(" <b")]
    assert parser.feed(" <tool_cal") == []
    assert parser.feed("m") == [ContentDelta(" <tool_calm")]
    assert parser.feed(" \n") == []
    assert parser.finish() == [ContentDelta(" \n")]


K2_HEAD = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
BROKEN = [
    ("hermes", "<tool_call>now()</tool_call> so", None),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', None),
    ("hermes", '<tool_call>{"name": ""}</tool_call>', None),
    ("hermes", '<tool_call>["now"]</tool_call>', None),
    ("hermes", '<tool_call>{"arguments": {}}</tool_call>', None),
    ("hermes", '<tool_call>{"name": "\\ud800"}</tool_call>', None),
    ("hermes", "</tool_call> a", None),
    ("llama3_json", '{"name": "unknown", "parameters": {}} ', None),
    ("llama3_json", '{"city": "Berlin", "days": [1, 2]}', None),
    ("llama3_json", '{"name": "now", "sights": 3}', None),
    ("llama3_json", "<|python_tag|>print(1)", None),
    ("llama3_json", 'Use {"name": "now", "parameters": {}}.', None),
    ("mistral", "[TOOL_CALLS] or not", None),
    ("mistral", "[TOOL_CALLS][now]", None),
    ("mistral", "[TOOL_CALLS]now[ARGS]yes", None),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>none!", None),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>a b<｜tool▁sep｜>", None),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>yes", None),
    ("qwen3_coder", "<tool_call>\n<function=a b>", None),
    ("qwen3_coder", "<tool_call>now!", None),
    ("glm45", "<tool_call>now()</tool_call>", None),
    ("glm45", '<tool_call>{"name": "now"}</tool_call>', None),
    ("glm45", "<tool_call>now<arg_key>a</arg_key><arg_value>[1", '{"a": "[1"'),
    ("minimax_m2", '<minimax:tool_call><invoke name="a b">', None),
    ("olmo3", "<function_calls>no call</function_calls>", None),
    ("olmo3", "<function_calls>now(3)</function_calls>", "{3)"),
    ("olmo3", "<function_calls>now(a=<)</function_calls>", '{"a": <)'),
    ("olmo3", "<function_calls>now(a='1", '{"a": "1'),
    ("hunyuan", "<tool_calls>now</tool_calls>", None),
    ("granite", '<|tool_call|>{"name": "now"}', None),
    ("granite", '<|tool_call|>[{"name": "now", "arguments": {]}]', "{]}]"),
    ("kimi_k2", "<|tool_call_begin|>a b", None),
    ("kimi_k2", f"{K2_HEAD}{{'a'}}<|tool_call_end|>", "{'a'}"),
    ("qwen3_coder", "<function=now><parameter=a>True</parameter> x", '{"a": true}'),
    ("qwen3_coder", "<function=now><parameter=a>\n1", '{"a": 1'),
    ("qwen3_coder", "<function=now><parameter=a", ""),
    ("qwen3_coder", "<function=get_weather><parameter=city>1\n", '{"city": "1'),
    # The call is out by the time that its arguments break: all of them go to who called.
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": <}}</tool_call>b', '{"a": <}}'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": [1', '{"a": [1'),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "1', '{"a": "1'),
    ("llama3_json", '{"name": "now", "parameters": {"a": (1)}}', '{"a": (1)}}'),
    ("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {]}', "{]}"),
    ("mistral", "[TOOL_CALLS]now{'a'}", "{'a'}"),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{'a'}<｜tool▁call▁end｜>", "{'a'}"),
    ("harmony", "<|channel|>commentary to=functions.now<|message|>a b<|call|>", "a b"),
]


# An answer that ends within the header of a call, or of a message.
CUT = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>\n{"name": "f'),
    ("hermes", '<tool_call>{"name": "now", '),
    ("qwen3_coder", "<tool_call>\n<function=no"),
    ("glm45", "<tool_call>now"),
    ("olmo3", "<function_calls>no"),
    ("hunyuan", '<tool_calls>[{"na'),
    ("granite", "<|tool_call|>["),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="n'),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>n"),
    ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f"),
    ("mistral", "[TOOL_CALLS]f[AR"),
    ("mistral", '[TOOL_CALLS][{"na'),
    ("llama3_json", '<|python_tag|>{"name": "now", "par'),
    ("harmony", "<|start|>assistant"),
    ("harmony", "<|channel|>final"),
    ("harmony", "<|channel|>commentary to=functions.now <|constrain|>json"),
]


@pytest.mark.parametrize(("name", "text"), CUT)
def test_a_header_that_is_cut_is_no_content(name: str, text: str) -> None:
    before = "<|channel|>final<|message|>ok<|end|>" if name == "harmony" else "ok"
    for pieces in ([before + text], list(before + text)):
        answer = read_format(name, pieces)
        assert (answer.content, answer.calls) == ("ok", [])


def test_a_list_that_is_cut_within_a_header_has_the_calls_before_it() -> None:
    answer = read_format("mistral", ['[TOOL_CALLS][{"name": "now", "arguments": {}}, {"na'])
    assert (answer.content, len(answer.calls)) == (None, 1)


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
DEFINITIONS = {"$defs": {"E": {"type": "string", "enum": ["1", "2"]}, "L": {"$ref": "#/$defs/L"}}}
# A parameter's schema, the text of a value, and the JSON that it is.
VALUES: list[tuple[Any, str, str]] = [
    (OPTIONAL, "1", '"1"'),
    (OPTIONAL, "null", "null"),
    (OPTIONAL, '"q"', r'"\"q\""'),
    ({"type": ["string", "null"]}, "true", '"true"'),
    ({"type": ["integer", "null"]}, "7", "7"),
    ({"type": ["string", "integer"]}, "7", "7"),
    ({"oneOf": [{"type": "number"}, {"$ref": "#/$defs/E"}]}, "2", "2"),
    ({"$ref": "#/$defs/E"}, "1", '"1"'),
    ({"allOf": [{"$ref": "#/$defs/E"}]}, "1", '"1"'),
    ({"$ref": "#/$defs/L"}, "1", "1"),
    ({"$ref": "#/none"}, "a b", '"a b"'),
    ({"enum": ["1", None]}, "1", '"1"'),
    ({"enum": ["1", None]}, "null", "null"),
    ({"enum": [1, "a"]}, "1", "1"),
    ({"const": "1"}, "1", '"1"'),
    ({"const": 1}, "1", "1"),
    ({"type": "number"}, "1", "1"),
    ({"type": "boolean"}, "True", "true"),
    ({"type": "array"}, "[1, ", '"[1, "'),
    ({}, '"a"', '"a"'),
    ({}, "a", '"a"'),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_a_bare_value_is_what_its_schema_allows(schema: Any, text: str, value: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, **DEFINITIONS}
    use = ToolUse(tools=(Tool(name="f", parameters=parameters),))
    for name, written in {
        "qwen3_coder": f"<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>",
        "glm45": f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>",
        "minimax_m2": f'<invoke name="f">\n<parameter name="a">{text}</parameter>\n</invoke>',
    }.items():
        (call,) = read_format(name, list(written), use).calls
        assert call.arguments == f'{{"a": {value}}}', name


FORGOTTEN = {
    "qwen3_coder": "<function=get_weather>\n<parameter=city>\nA\n<parameter=days>\n1\n</function>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>A\n<arg_key>days"
    "</arg_key>\n<arg_value>1\n</tool_call>",
    "minimax_m2": '<invoke name="get_weather">\n<parameter name="city">A\n'
    '<parameter name="days">1\n</invoke>',
}


@pytest.mark.parametrize("name", FORGOTTEN)
def test_a_value_ends_where_the_next_one_begins(name: str) -> None:
    for at in range(1, len(FORGOTTEN[name])):
        answer = read_format(name, [FORGOTTEN[name][:at], FORGOTTEN[name][at:]])
        (call,) = answer.calls
        assert call.arguments == '{"city": "A", "days": 1}', at
        assert answer.content is None


def test_a_call_of_kimi_has_the_id_that_the_model_gave_it() -> None:
    parser = parser_of(format_of("kimi_k2"), USE)
    begin, _ = parser.feed(f"{K2_HEAD}{{}}<|tool_call_end|>")
    assert isinstance(begin, CallBegin)
    assert begin.id == "functions.now:0"


@pytest.mark.parametrize(("name", "text", "arguments"), BROKEN)
def test_a_broken_call_loses_no_text(name: str, text: str, arguments: str | None) -> None:
    whole = read_format(name, [text])
    if arguments is None:
        assert whole.content == text
        assert whole.calls == []
    else:
        assert [call.arguments for call in whole.calls] == [arguments]
    for at in range(1, len(text)):
        assert read_format(name, [text[:at], text[at:]]) == whole, at
    assert read_format(name, list(text)) == whole


ODD = [
    ('{"name": "now"}', "{}"),
    ('{"name": "now", "arguments": null}', "{}"),
    ('{"name": "now", "arguments": ""}', "{}"),
    (r'{"name": "now", "arguments": "{\"a\": \"\u00e9\"}"}', '{"a": "é"}'),
    ('{ "name" : "now" ,\n"arguments" :\t{ } }', "{ }"),
    ('{"id": [{"arguments": 1}], "name": "now", "parameters": {"a": 1}, "b": 2}', '{"a": 1}'),
    ('{"arguments": {"a": 1}, "name": "now"}', '{"a": 1}'),
    ('{"name": "now", "arguments": 7}', "7"),
    ('{"name": "now", "arguments": [1, [2]]}', "[1, [2]]"),
]


@pytest.mark.parametrize(("written", "arguments"), ODD)
def test_arguments_come_in_other_shapes(written: str, arguments: str) -> None:
    for pieces in ([written], list(written)):
        answer = read_format("hermes", ["<tool_call>", *pieces, "</tool_call>"])
        assert [(call.name, call.arguments) for call in answer.calls] == [("now", arguments)]
        assert answer.content is None


def test_a_comma_behind_the_last_value_of_python_is_not_in_the_arguments() -> None:
    text = "<function_calls>now(a=(1,), b=[[2, ], {'c': 'd,',\n},],)</function_calls>"
    for pieces in ([text], list(text)):
        (call,) = read_format("olmo3", pieces).calls
        assert json.loads(call.arguments) == {"a": [1], "b": [[2], {"c": "d,"}]}


def test_a_broken_call_is_followed_by_a_good_one() -> None:
    good = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    for bad in ("<tool_call>", "<tool_call>{", '<tool_call>{"name": 3}', '<tool_call>{"name": "a"'):
        answer = read_format("hermes", [f"{bad} {good}"])
        assert answer.content == bad
        assert [call.name for call in answer.calls] == ["now"]


def test_a_brace_too_many_is_text() -> None:
    text = '<tool_call>{"name": "now", "arguments": {}}}</tool_call> done'
    answer = read_format("hermes", [text])
    assert (answer.content, len(answer.calls)) == ("} done", 1)


def test_ids_are_fresh_and_as_the_templates_want_them() -> None:
    ids: dict[str, list[str]] = {}
    for case in ALL:
        parser = parser_of(format_of(case.format), USE)
        deltas = parser.feed(case.text) + parser.finish()
        ids.setdefault(case.format, []).extend(d.id for d in deltas if isinstance(d, CallBegin))
    assert "abcDEF123" in ids["mistral"]
    assert all(len(each) == 9 and each.isalnum() for each in ids["mistral"])
    assert all(each.startswith("call_") for each in ids["hermes"])
    everything = [each for found in ids.values() for each in found]
    assert len(set(everything)) == len(everything)


def test_without_tools_llama_json_is_content() -> None:
    text = '{"name": "get_weather", "parameters": {}}'
    assert read_format("llama3_json", [text], ToolUse()).content == text


def num_lines_run(work: Callable[[], Any]) -> int:
    """Lines that the parsers execute: what takes time, and the same on every machine."""
    count = 0

    def local(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        count += event == "line"
        return local

    def start(frame: FrameType, event: str, _: Any) -> Any:
        path = frame.f_code.co_filename
        return local if path.endswith(PARSER_FILES) or "tool_calls" in path else None

    sys.settrace(start)
    try:
        work()
    finally:
        sys.settrace(None)
    return count


CALL = '<tool_call>{"name": "now", "arguments": '
HOSTILE = {
    "braces": ("hermes", CALL, "{"),
    "braces without a call": ("llama3_json", "", "{"),
    "keys": ("hermes", "<tool_call>{", '"a": {'),
    "spaces": ("hermes", "", " "),
    "spaces in a call": ("hermes", "<tool_call>", " "),
    "begins": ("hermes", "", "<tool_call>"),
    "half begins": ("hermes", "", "<tool_call"),
    "objects that are no calls": ("hermes", "", '<tool_call>{"a": "'),
    "an endless text": ("hermes", CALL + '"', "\\"),
    "lists": ("mistral", "[TOOL_CALLS]", "["),
    "names": ("mistral", "[TOOL_CALLS]", "a"),
    "many calls": ("mistral", "[TOOL_CALLS][", '{"name": "a"},'),
    "fences": ("deepseek_v3", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function"),
    "parameters": ("qwen3_coder", "<function=a>", "<parameter=a></parameter>"),
    "line breaks": ("qwen3_coder", "<function=get_weather><parameter=city>", "\n"),
    "values": ("glm45", "<tool_call>a", "<arg_key>a</arg_key><arg_value></arg_value>"),
    "broken lines": ("minimax_m2", '<invoke name="now"><parameter name="a">', "\n<"),
    "ids": ("kimi_k2", "<|tool_call_begin|>", "a:"),
    "headers": ("harmony", "<|channel|>", "<|start|>"),
    "messages": ("harmony", "", "<|channel|>analysis<|message|> "),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("by_character", [True, False])
def test_hostile_text_takes_time_in_proportion(
    hostile: tuple[str, str, str], by_character: bool
) -> None:
    name, begin, unit = hostile
    runs = []
    for size in (1000, 4000):
        text = (begin + unit * size)[: len(begin) + 2 * size]
        pieces = list(text) if by_character else [text]

        def work(pieces: list[str] = pieces) -> None:
            read_format(name, pieces)

        runs.append(num_lines_run(work))
    assert runs[1] < 4.5 * runs[0] + 500


def test_100_kb_of_braces_are_read_and_given_back() -> None:
    text = "{" * 100_000
    call = read_format("hermes", [CALL, text]).calls[0]
    assert call.arguments == text
    assert read_format("llama3_json", [text]).content == text
    assert read_format("hermes", [f"<tool_call>{text}"]).content == f"<tool_call>{text}"
