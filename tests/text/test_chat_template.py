"""Chat templates: jinja as transformers renders it, and PaddleNLP's JSON form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predict.errors import UserError
from predict.text.chat_template import (
    JinjaTemplate,
    PaddleTemplate,
    load_chat_template,
)
from predict.text.conversation import content_text, conversation_messages

GOLDEN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "tokenizers.json").read_text(encoding="utf-8")
)["templates"]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ASK = [{"role": "user", "content": "hello"}]
PADDLE = {
    "system": "You are a helper.\n",
    "conversation": ["[Q{{index}}] {{user}}\n", "[A] {{bot}}</s>\n"],
    "query": "[Q] {{query}}\n[A] ",
}


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_jinja_renders_as_transformers_does(case: dict[str, Any]) -> None:
    template = JinjaTemplate(case["source"], SPECIAL, "the test")
    assert template.render(case["messages"]) == case["text"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% if %}", "not valid jinja"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.no.such.thing }}", "failed|refused"),
        ("{{ 1 / 0 }}", "failed"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe|refused|failed"),
        ("{% for i in range(10**9) %}{% endfor %}", "refused|failed"),
    ],
)
def test_a_template_that_fails_is_a_user_error(source: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        JinjaTemplate(source, SPECIAL, "the test").render(ASK)


def test_paddle_template_renders_system_rounds_and_query() -> None:
    template = PaddleTemplate(PADDLE, "the test")
    assert template.render(ASK) == "You are a helper.\n[Q] hello\n[A] "
    rounds = conversation_messages([["one", "1"], ["two", "2"], ["three"]], "")
    assert template.render(rounds) == (
        "You are a helper.\n[Q0] one\n[A] 1</s>\n[Q1] two\n[A] 2</s>\n[Q] three\n[A] "
    )


def test_a_system_message_fills_or_replaces_the_paddle_system_part() -> None:
    messages = [{"role": "system", "content": "Be brief."}, *ASK]
    assert PaddleTemplate(PADDLE, "t").render(messages) == "Be brief.[Q] hello\n[A] "
    filled = PADDLE | {"system": "<<{{system}}>>"}
    assert PaddleTemplate(filled, "t").render(messages) == "<<Be brief.>>[Q] hello\n[A] "
    assert PaddleTemplate(filled, "t").render(ASK) == "<<>>[Q] hello\n[A] "
    inside = {"query": "{% if system %}{{ system }} {% endif %}{{query}}"}
    assert PaddleTemplate(inside, "t").render(messages) == "Be brief. hello"


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"qury": "x"}, "query is needed"),
        ({"query": "x", "conversation": ["one"]}, "two texts"),
        ({"query": "x", "extra": 1}, "extra"),
    ],
)
def test_a_wrong_paddle_template_is_refused(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        PaddleTemplate(parts, "the test")


@pytest.mark.parametrize(
    "messages",
    [
        [*ASK, {"role": "assistant", "content": "hi"}],
        [*ASK, *ASK],
        [{"role": "tool", "content": "x"}],
        [{"role": "system", "content": "x"}],
    ],
)
def test_paddle_templates_need_alternating_roles(messages: list[dict[str, str]]) -> None:
    with pytest.raises(UserError, match="by turns"):
        PaddleTemplate(PADDLE, "the test").render(messages)


def test_earlier_rounds_need_a_conversation_part() -> None:
    with pytest.raises(UserError, match="no conversation part"):
        PaddleTemplate({"query": "{{query}}"}, "t").render(
            conversation_messages([["a", "b"], ["c"]], "")
        )


def test_templates_are_found_where_the_flag_says(tmp_path: Path) -> None:
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    assert load_chat_template(own, None, SPECIAL) is None
    config = {"chat_template": "config {{ bos_token }}"}
    (own / "tokenizer_config.json").write_text(json.dumps(config))
    (other / "chat_template.jinja").write_text("file")
    (other / "additional_chat_templates").mkdir()
    (other / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (other / "paddle.json").write_text(json.dumps(PADDLE))

    def rendered(flag: str | None) -> str | None:
        template = load_chat_template(own, flag, SPECIAL)
        return None if template is None else template.render(ASK)

    assert rendered(None) == "config <s>"
    assert rendered("none") is None
    assert rendered(str(other)) == "file"
    assert rendered(str(other / "chat_template.jinja")) == "file"
    with_tools = load_chat_template(own, str(other), SPECIAL)
    assert with_tools is not None
    assert with_tools.render(ASK, [{"type": "function"}]) == "tools"
    assert rendered(str(own / "tokenizer_config.json")) == "config <s>"
    assert rendered(str(other / "paddle.json")) == "You are a helper.\n[Q] hello\n[A] "
    (own / "chat_template.json").write_text(json.dumps(PADDLE))
    assert rendered(None) == "You are a helper.\n[Q] hello\n[A] "  # PaddleNLP's file first


def test_the_default_of_named_templates_is_used(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(tmp_path, None, SPECIAL)
    assert template is not None
    assert template.render(ASK) == "d"
    assert template.render(ASK, [{"type": "function"}]) == "t"
    path.write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(UserError, match=r"tool_use.*default"):
        load_chat_template(tmp_path, None, SPECIAL)


@pytest.mark.parametrize(("made", "said"), [(True, "no chat template in it"), (False, "neither")])
def test_a_flag_without_a_template_is_refused(tmp_path: Path, made: bool, said: str) -> None:
    path = tmp_path / "empty"
    if made:
        path.mkdir()
    with pytest.raises(UserError, match=said):
        load_chat_template(tmp_path, str(path), SPECIAL)


QUESTIONS = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


@pytest.mark.parametrize(
    ("src", "tgt", "messages"),
    [
        ("a", "", QUESTIONS[:1]),
        (["a"], "", QUESTIONS[:1]),
        (["a"], ["ignored"], QUESTIONS[:1]),
        (["a", "c"], ["b"], QUESTIONS),
        (["a", "c"], ["b", "ignored"], QUESTIONS),
        ([["a", "b"], ["c"]], "", QUESTIONS),
        (QUESTIONS, "", QUESTIONS),
        ([{"role": "assistant", "content": None, "refusal": "b"}], "",
         [{**QUESTIONS[1], "refusal": "b"}]),
    ],
)  # fmt: skip
def test_every_form_of_a_conversation_becomes_messages(
    src: Any, tgt: Any, messages: list[dict[str, str]]
) -> None:
    assert conversation_messages(src, tgt) == messages


PICTURE = {"type": "image_url", "image_url": {"url": "x.png"}}
TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("src", "tgt", "said"),
    [
        ([], "", "not empty"),
        (["a", "b"], "", "1 answers must be given"),
        (["a", ["b"]], "", "mixes"),
        ([["a", "b"]], "", "0 answers"),
        ([["a"], ["b"]], "", "1 answers"),
        ([["a", 3], ["b"]], "", "a number among questions"),
        ([["a", None], ["b"]], "", "null among questions"),
        ([{"content": "x"}], "", "message 1 has no role"),
        ([{"role": None, "content": "x"}], "", "message 1 has the role null"),
        ([{"role": "user"}], "", r"message 1 \(user\) has no content"),
        ([QUESTIONS[0], {"role": "user", "content": None}], "", r"message 2 .*the content null"),
        ([{"role": "assistant", "content": None}], "", "the content null"),
        ([{"role": "user", "content": None, "tool_calls": [1]}], "", "the content null"),
        ([{"role": "user", "content": 5}], "", "a number as content"),
        ([{"role": "user", "content": {"text": "a"}}], "", "an object as content"),
        ([{"role": "user", "content": [TEXT, PICTURE]}], "", "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "", "'input_audio'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "", "has no text"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "", "a number as text"),
        ([{"role": "user", "content": [3]}], "", "a number as a part"),
        (3, "", "a text or a list"),
    ],
)
def test_malformed_conversations_are_refused(src: Any, tgt: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        conversation_messages(src, tgt)


def test_text_parts_have_one_form_and_other_fields_stay() -> None:
    parts = [{"type": "text", "text": "What is "}, "this", {"type": "input_text", "text": "?"}]
    (message,) = conversation_messages([{"role": "user", "content": parts, "name": "Ann"}], "")
    texts = [{"type": "text", "text": text} for text in ("What is ", "this", "?")]
    assert message == {"role": "user", "content": texts, "name": "Ann"}
    assert content_text(message["content"]) == "What is this?"


_LOOP = "{% for m in messages %}[{{ m.role }}]"
_PARTS = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }};{% endif %}{% endfor %}"
# A template's way with a content, and what it prints of "ab" and of the parts "a", "b".
CONTENTS = {
    "text": (_LOOP + "{{ m.content }}{% endfor %}", "ab", "ab"),
    "text, and parts as JSON": (
        _LOOP + "{{ m.content | tojson }}{# text #}{% endfor %}", '"ab"', '"ab"',
    ),
    "parts": (_LOOP + _PARTS + "{% endfor %}", "ab;", "a;b;"),
    "parts by a filter": (
        _LOOP + "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ p['text'] }};{% endfor %}{% endfor %}",
        "ab;", "a;b;",
    ),
    "both": (
        _LOOP + "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS
        + "{% endif %}{% endfor %}",
        "ab", "a;b;",
    ),
    "the first part": (_LOOP + "{{ m.content[0]['text'] }}{% endfor %}", "ab", "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
def test_a_content_reaches_a_template_in_the_form_that_it_reads(name: str, role: str) -> None:
    source, text, parts = CONTENTS[name]
    template = JinjaTemplate(source, {}, "the test")
    for content, said in (("ab", text), (["a", "b"], parts)):
        messages = conversation_messages([{"role": role, "content": content}], "")
        assert template.render(messages) == f"[{role}]{said}"


def test_roles_may_read_contents_in_ways_of_their_own() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content[0].text }}"
        "{% elif m.role == 'system' %}{{ raise_exception('no system') }}"
        "{% else %}{{ m.content + '!' }}{% endif %}{% endfor %}"
    )
    assert JinjaTemplate(source, {}, "the test").render(QUESTIONS) == "ab!c"
    with pytest.raises(UserError, match="no system"):
        JinjaTemplate(source, {}, "the test").render([{"role": "system", "content": "x"}])


def test_a_tool_call_without_content_never_says_none() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    messages = conversation_messages([QUESTIONS[0], called], "")
    text = JinjaTemplate("{% for m in messages %}{{ m.content }}|{% endfor %}", {}, "t")
    assert text.render(messages) == "a||"
    assert messages[1]["tool_calls"] == [{"id": "1"}]
