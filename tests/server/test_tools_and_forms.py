"""Tools of a request beside a form of its answer, and a choice among some of the tools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.conftest import TEMPLATE
from tests.support.http_server import ScriptedServer, config_of
from tests.support.tiny import TOKENIZER
from tests.support.tool_guides import takes

TOOLS = [{"type": "function", "function": {"name": name}} for name in "fgh"]
CHAT = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    config = config_of(TOKENIZER, TEMPLATE, max_length=1024)
    with ScriptedServer(config, lambda prompt, params: ["hm", "</thi", "nk>\n\nYes"]) as server:
        yield server


def call(name: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>'


def asked(client: httpx.Client, server: ScriptedServer, **fields: Any) -> Any:
    response = client.post("/v1/chat/completions", json={**CHAT, **fields})
    assert response.status_code == 200, response.text
    return server.engine.added[-1][1].guide


def test_an_answer_calls_a_tool_or_has_the_form(
    client: httpx.Client, server: ScriptedServer
) -> None:
    guide = asked(client, server, response_format=FORM)
    for thought in ("", "<think>so</think>"):
        assert takes(guide, thought + call("f"))
        assert takes(guide, thought + '{"a": 5}')
    for text in ("words", '{"a": "b"}', call("i"), call("f") + '{"a": 5}'):
        assert not takes(guide, text)
    assert takes(asked(client, server, response_format={"type": "json_object"}), '{"b": []}')
    for form in ({"choice": ["yes", "no"]}, {"regex": "no?"}, {"grammar": 'start: "no"'}):
        guide = asked(client, server, guide=form)
        assert takes(guide, "no")
        assert takes(guide, call("f"))
        assert not takes(guide, "yes no")


def test_a_forced_call_has_no_form(client: httpx.Client, server: ScriptedServer) -> None:
    guide = asked(client, server, response_format=FORM, tool_choice="required")
    assert takes(guide, call("f"))
    assert not takes(guide, '{"a": 5}')


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called(
    client: httpx.Client, server: ScriptedServer, mode: str
) -> None:
    allowed = {"mode": mode, "tools": TOOLS[:2]}
    guide = asked(client, server, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert takes(guide, call("f"))
    assert takes(guide, call("g"))
    assert not takes(guide, call("h"))
    assert takes(guide, "words") == (mode == "auto")


def test_the_end_of_a_thought_alone_ends_it(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=CHAT)
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "Yes")
    events = client.post("/v1/chat/completions", json={**CHAT, "stream": True}).text
    pieces = [json.loads(e[6:])["choices"][0]["delta"] for e in events.split("\n\n")[:-2]]
    assert "".join(p.get("content", "") for p in pieces) == "hm</think>\n\nYes"
