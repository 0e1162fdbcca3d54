"""Calls and results of earlier turns, through templates in the style of each family."""

from __future__ import annotations

import json
from typing import Any

import pytest

from predict.text.chat_template import JinjaTemplate
from predict.text.conversation import conversation_messages
from predict.text.tool_calls import detected, template_messages
from tests.text.tool_calls.published import read_format

ARGUMENTS = '{"city": "Köln", "days": 2}'
CALL = {
    "id": "call_0123456789abcdef",
    "type": "function",
    "function": {"name": "get_weather", "arguments": ARGUMENTS},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": CALL["id"], "content": [{"type": "text", "text": "rain"}]},
]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]

# Small templates of our own, each in the way that a family's is written.
QWEN = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<tool_response>{{ message.content }}</tool_response>
{%- else %}[{{ message.role }}]{{ message.content }}
{%- for call in message.tool_calls %}{% set call = call.function %}
<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>
{%- endfor %}
{%- endif %}
{%- endfor %}"""
LLAMA = """
{%- for message in messages %}<|start_header_id|>
{%- if "tool_calls" in message %}{% set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}}
{%- elif message.role == "tool" %}{{ message.content | tojson }}
{%- else %}{{ message.content }}
{%- endif %}
{%- endfor %}"""
MISTRAL = """
{%- for message in messages %}
{%- if message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception("ids have nine characters") }}{% endif %}
{{- call.function | tojson }}
{%- endfor %}]
{%- elif message.role == "tool" %}[TOOL_RESULTS]{{ message.tool_call_id }} {{ message.name }}
{{- message.content }}[/TOOL_RESULTS]
{%- else %}[INST]{{ message.content }}[/INST]
{%- endif %}
{%- endfor %}"""
DEEPSEEK = """
{%- for message in messages %}
{%- if message['tool_calls'] %}
{%- for tool in message['tool_calls'] %}
{{- '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' }}
{{- tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' }}
{{- '```' + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}
{%- endfor %}
{%- else %}{{ message['content'] }}
{%- endif %}
{%- endfor %}"""
CODER = """
{%- for message in messages %}
{%- for call in message.tool_calls %}
<tool_call>
<function={{ call.function.name }}>
{%- for name, value in call.function.arguments | items %}
<parameter={{ name }}>
{{ value }}
</parameter>
{%- endfor %}
</function>
</tool_call>
{%- endfor %}
{%- endfor %}"""
GLM = """
{%- for message in messages %}
{%- for call in message.tool_calls %}
<tool_call>{{ call.function.name }}
{% for name, value in call.function.arguments.items() %}<arg_key>{{ name }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- endfor %}"""
MINIMAX = """
{%- set begin, end = '<minimax:tool_call>', '</minimax:tool_call>' %}
{%- for message in messages %}
{%- for call in message.tool_calls %}
{{ begin }}
<invoke name="{{ call.function.name }}">
{%- for name, value in call.function.arguments.items() %}
<parameter name="{{ name }}">{{ value if value is string else value | tojson }}</parameter>
{%- endfor %}
</invoke>
{{ end }}
{%- endfor %}
{%- endfor %}"""
KIMI = """
{%- for message in messages %}
{%- for call in message.tool_calls %}<|tool_calls_section_begin|><|tool_call_begin|>functions.
{{- call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>
{{- call.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>
{%- endfor %}
{%- endfor %}"""
HARMONY = """
{%- for message in messages %}<|start|>
{%- if message.tool_calls %}assistant<|channel|>commentary to=
{{- "functions." + message.tool_calls[0].function.name }} <|constrain|>json<|message|>
{{- message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif message.role == "tool" %}functions.{{ message.name }}<|message|>{{ message.content }}
{%- else %}{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}"""
SEED = CODER.replace("tool_call>", "seed:tool_call>").replace("\n{{ value }}\n", "{{ value }}")
OLMO = """<functions>{{ tools | tojson }}</functions>
{%- for message in messages %}
{%- if message.tool_calls %}<function_calls>
{%- for call in message.tool_calls %}{{ call.function.name }}(
{%- for key, value in call.function.arguments.items() %}
{{- key }}={{ value | tojson }}{% if not loop.last %}, {% endif %}
{%- endfor %}){% if not loop.last %}{{ "\n" }}{% endif %}
{%- endfor %}</function_calls>
{%- endif %}
{%- endfor %}"""
HUNYUAN = """<tool_calls>[...]</tool_calls>
{%- for message in messages %}
{%- if message.tool_calls %}<tool_calls>[
{%- for call in message.tool_calls %}{"name": "{{ call.function.name }}", "arguments":
{{- call.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}
{%- endfor %}]</tool_calls>
{%- else %}{{ message.content }}
{%- endif %}
{%- endfor %}"""
# Which has no place for calls but the content.
GRANITE = """{% if tools %}<|tool_call|> followed by a list{% endif %}
{%- for message in messages %}
{{ "<|start_of_role|>" + message["role"] + "<|end_of_role|>" + message["content"] }}
{%- endfor %}"""
TEMPLATES = {
    "olmo3": OLMO,
    "hunyuan": HUNYUAN,
    "granite": GRANITE,
    "hermes": QWEN,
    "llama3_json": LLAMA,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
    "qwen3_coder": CODER,
    "glm45": GLM,
    "minimax_m2": MINIMAX,
    "seed_oss": SEED,
    "kimi_k2": KIMI,
    "harmony": HARMONY,
}


def rendered(source: str, messages: list[dict[str, Any]] = MESSAGES) -> str:
    shaped = template_messages(conversation_messages(messages, ""), source)
    return JinjaTemplate(source, {}, "the test").render(shaped, TOOLS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_of_an_earlier_turn_is_written_as_its_format_reads_it(name: str) -> None:
    row = detected(TEMPLATES[name])
    assert row is not None
    assert row.name == name
    text = rendered(TEMPLATES[name])
    if name == "llama3_json":  # a call stands at the beginning of its turn
        text = text.split("<|start_header_id|>")[2]
    answer = read_format(name, [text])
    assert [call.name for call in answer.calls] == ["get_weather"]
    assert json.loads(answer.calls[0].arguments.partition("<|call|>")[0]) == json.loads(ARGUMENTS)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (QWEN, "<tool_response>rain</tool_response>"),
        (LLAMA, '"rain"'),
        (MISTRAL, "get_weatherrain[/TOOL_RESULTS]"),
        (HARMONY, "functions.get_weather<|message|>rain"),
    ],
)
def test_a_result_reaches_the_template_with_its_tools_name(template: str, said: str) -> None:
    assert said in rendered(template)
    assert "None" not in rendered(template)


def test_tools_reach_the_template() -> None:
    assert json.dumps(TOOLS[0]) in rendered(QWEN)


def test_an_id_of_another_server_is_the_same_in_call_and_result() -> None:
    shaped = template_messages(MESSAGES, MISTRAL)
    new = shaped[1]["tool_calls"][0]["id"]
    assert shaped[2]["tool_call_id"] == new
    assert (len(new), new.isalnum()) == (9, True)
    assert template_messages(shaped, MISTRAL) == shaped
    assert template_messages(MESSAGES, QWEN)[2]["tool_call_id"] == CALL["id"]


def test_messages_are_left_as_they_were() -> None:
    before = json.dumps(MESSAGES)
    template_messages(MESSAGES, DEEPSEEK)
    assert json.dumps(MESSAGES) == before


@pytest.mark.parametrize("given", [{"id": "a"}, {"function": "f"}, "f"])
def test_what_is_no_call_is_not_written_into_the_content(given: Any) -> None:
    for calls, written in (([given], ""), ([given, CALL], "get_weather")):
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        (shaped,) = template_messages([message], GRANITE)
        assert shaped["tool_calls"][0] == given
        assert bool(shaped["content"]) == bool(written)
        assert written in shaped["content"]


@pytest.mark.parametrize("given", ["no JSON", "[1]", '{"a": 1', "7"])
def test_arguments_that_are_no_object_stay_as_the_model_wrote_them(given: str) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    for source in (QWEN, DEEPSEEK):
        shaped = template_messages([message], source)
        assert shaped[0]["tool_calls"][0]["function"]["arguments"] == given


@pytest.mark.parametrize(
    ("given", "walked"),
    [
        (None, {}),
        ("null", {}),
        ("", {}),
        ('{"a": 1', {"arguments": '{"a": 1'}),
        ("[1]", {"arguments": [1]}),
        ('{"a": 1}', {"a": 1}),
    ],
)
def test_arguments_of_any_kind_are_an_object_where_a_template_walks_them(
    given: str | None, walked: dict[str, Any]
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": given}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    for source in (CODER, GLM, MINIMAX):
        (shaped,) = template_messages([message], source)
        assert shaped["tool_calls"][0]["function"]["arguments"] == walked
    if given == '{"a": 1':
        for source in (QWEN, DEEPSEEK, CODER):
            assert "f" in rendered(source, [MESSAGES[0], message])


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_thoughts_stand_under_the_names_that_templates_use(key: str) -> None:
    calling = {"role": "assistant", "content": "", key: "Hm.", "tool_calls": [CALL]}
    (shaped,) = template_messages([calling], QWEN)
    assert (shaped["reasoning_content"], shaped["thinking"]) == ("Hm.", "Hm.")
    (shaped,) = template_messages([{"role": "assistant", "content": "A.", key: "Hm."}], QWEN)
    assert (shaped["reasoning_content"], shaped["reasoning"]) == ("Hm.", "Hm.")
    assert "thinking" not in shaped


@pytest.mark.parametrize(
    "source",
    [
        "{% for message in messages %}{{ message.content }}{% endfor %}",
        # Near Hermes, and near Llama's.
        "<tool_call>{{ name }}: {{ call.arguments | tojson }}</tool_call>",
        "<tool_call><name>{{ name }}</name><arguments>{{ arguments }}</arguments></tool_call>",
        "<|start_header_id|>{{ tool.parameters }} [{{ name }}({{ arguments }})]",
    ],
)
def test_a_template_without_the_marks_of_a_form_has_none(source: str) -> None:
    assert detected(source) is None


@pytest.mark.parametrize(
    "written",
    [
        r"""{{- '<tool_call>\n{\"name\": <name>, \"arguments\": <args>}\n</tool_call>' }}""",
        """{{ "<tool_call>{'arguments' : {}, 'name' : ''}</tool_call>" }}""",
    ],
)
def test_marks_are_found_however_a_template_quotes_them(written: str) -> None:
    row = detected(written)
    assert row is not None
    assert row.name == "hermes"
