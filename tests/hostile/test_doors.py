"""Hostile bodies of the Responses and Messages APIs: each is a 4xx that names the field."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from predict.server.messages import MessagesBody, asked
from predict.server.protocol import parsed
from tests.support.http_server import SECONDS, ScriptedServer, config_of
from tests.support.paths import ROOT
from tests.support.tiny import TOKENIZER

USER = {"role": "user", "content": "x"}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
ALLOWED = {"type": "allowed_tools", "mode": "auto"}
SOURCE = {"type": "url", "url": "http://169.254.169.254/"}


def said(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def turns(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, said(*parts, role=role), USER]}


# Fields beside, or in place of, `input`, and the field that is named.
RESPONSES: dict[str, tuple[dict[str, Any], str]] = {
    "no input": ({"input": None}, "input"),
    "a number": ({"input": 5}, "input"),
    "an object": ({"input": {"role": "user"}}, "input"),
    "no items": ({"input": []}, "input"),
    "many items": ({"input": [USER] * 9000}, "input"),
    "more items than tokens": ({"input": [USER] * 300}, "input"),
    "a long text": ({"input": "word " * 100_000}, "input"),
    "an item that is a text": ({"input": ["x"]}, "input[0]"),
    "an item of no type": ({"input": [USER, {"content": "x"}]}, "input[1].type"),
    "an item of a type that is a list": ({"input": [{"type": ["message"]}]}, "input[0].type"),
    "an item of another type": ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
    "a reference": ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
    "an unknown role": ({"input": [{"role": "root", "content": "x"}]}, "input[0].role"),
    "a tool's role": ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    "no content": ({"input": [{"role": "user"}]}, "input[0].content"),
    "a number as content": ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    "an image": (
        {"input": [USER, said({"type": "input_image", "image_url": SOURCE["url"]})]},
        "input[1].content[0].type",
    ),
    "a file": ({"input": [said({"type": "input_file"})]}, "input[0].content[0].type"),
    "a part without text": ({"input": [said({"type": "input_text"})]}, "input[0].content[0].text"),
    "an unknown field": ({"input": [{**USER, "contents": "x"}]}, "input[0].contents"),
    "a call without a name": ({"input": [{**CALL, "name": ""}]}, "input[0].name"),
    "arguments that are an object": ({"input": [{**CALL, "arguments": {}}]}, "input[0].arguments"),
    "a result of no call": (
        {"input": [{"type": "function_call_output", "output": "x"}]},
        "input[0].call_id",
    ),
    "a result that is a number": (
        {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": 5}]},
        "input[1].output",
    ),
    "a result of an unknown call": (
        {"input": [CALL, {"type": "function_call_output", "call_id": "d", "output": "x"}]},
        "input[1].call_id",
    ),
    "a result ahead of its call": (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": "x"}, CALL]},
        "input[0].call_id",
    ),
    "a thought that is a text": (
        {"input": [{"type": "reasoning", "summary": "x"}]},
        "input[0].summary",
    ),
    "a part of a thought": (
        {"input": [{"type": "reasoning", "summary": [{"type": "x", "text": "x"}]}]},
        "input[0].summary[0].type",
    ),
    "an unknown field of the body": ({"temprature": 1}, "temprature"),
    "chat's field": ({"messages": [USER]}, "messages"),
    "a hosted tool": ({"tools": [{"type": "web_search", "filters": {}}]}, "tools[0].type"),
    "code": ({"tools": [{"type": "code_interpreter", "container": "c"}]}, "tools[0].type"),
    "another server": ({"tools": [{"type": "mcp", "server_url": "http://x"}]}, "tools[0].type"),
    "a function of chat": ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
    "a tool's name": ({"tools": [{**FUNCTION, "name": "a b"}]}, "tools[0].name"),
    "parameters that are a list": (
        {"tools": [{**FUNCTION, "parameters": []}]},
        "tools[0].parameters",
    ),
    "two tools of one name": ({"tools": [FUNCTION, FUNCTION]}, "tools"),
    "many tools": ({"tools": [{**FUNCTION, "name": f"f{i}"} for i in range(600)]}, "tools"),
    "large tools": ({"tools": [{**FUNCTION, "description": "x" * 99_999}]}, "tools"),
    "a choice of no tool": ({"tools": [FUNCTION], "tool_choice": "always"}, "tool_choice"),
    "a choice of a hosted tool": (
        {"tools": [FUNCTION], "tool_choice": {"type": "file_search"}},
        "tool_choice",
    ),
    "a tool that is not there": (
        {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}},
        "tool_choice",
    ),
    "allowed tools that are a number": (
        {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": 5}},
        "tool_choice",
    ),
    "an allowed tool whose name is a list": (
        {"tools": [FUNCTION], "tool_choice": {**ALLOWED, "tools": [{**FUNCTION, "name": ["f"]}]}},
        "tool_choice",
    ),
    "less than none": ({"max_output_tokens": 0}, "max_output_tokens"),
    "half a token": ({"max_output_tokens": 4.5}, "max_output_tokens"),
    "below zero": ({"temperature": -1}, "temperature"),
    "a share above 1": ({"top_p": 1.5}, "top_p"),
    "an unknown form": ({"text": {"format": {"type": "xml", "of": 1}}}, "text.format.type"),
    "a form without its schema": (
        {"text": {"format": {"type": "json_schema"}}},
        "text.format.schema",
    ),
    "a schema that is a number": (
        {"text": {"format": {"type": "json_schema", "schema": 5}}},
        "text.format.schema",
    ),
    "a large schema": (
        {"text": {"format": {"type": "json_schema", "schema": {"enum": ["x" * 99_999]}}}},
        "text.format.schema",
    ),
    "words": ({"text": {"verbosity": "high"}}, "text.verbosity"),
    "a summary": ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    "an effort": ({"reasoning": {"effort": 5}}, "reasoning.effort"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    "many logprobs": ({"top_logprobs": 5}, "top_logprobs"),
    "a conversation": ({"conversation": "conv_1"}, "conversation"),
    "a prompt of elsewhere": ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    "a response that is not there": ({"previous_response_id": "resp_1"}, "previous_response_id"),
    "a long id": ({"previous_response_id": "x" * 10_000}, "previous_response_id"),
    "background, and not kept": ({"background": True, "store": False}, "store"),
    "options without a stream": ({"stream_options": {}}, "stream_options"),
    "another truncation": ({"truncation": "middle"}, "truncation"),
    "much metadata": ({"metadata": {str(i): "x" for i in range(99)}}, "metadata"),
    "long metadata": ({"metadata": {"a": "x" * 9999}}, "metadata.a"),
    "another model": ({"model": "x" * 1000}, "model"),
}

# Fields beside, or in place of, `messages` and `max_tokens`, and the field that is named.
MESSAGES: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "messages as a text": ({"messages": "x"}, "messages"),
    "a message as a text": ({"messages": ["x"]}, "messages[0]"),
    "many messages": ({"messages": [USER] * 5000}, "messages"),
    "more messages than tokens": ({"messages": [USER] * 300}, "messages"),
    "a long text": ({"messages": [{**USER, "content": "word " * 99_000}]}, "messages"),
    "an unknown role": ({"messages": [{**USER, "role": "tool"}]}, "messages[0].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "nothing as content": ({"messages": [{**USER, "content": None}]}, "messages[0].content"),
    "no blocks": ({"messages": [said()]}, "messages[0].content"),
    "many blocks": (
        {"messages": [said(*[{"type": "text", "text": "x"}] * 5000)]},
        "messages[0].content",
    ),
    "a block that is a text": ({"messages": [said("x")]}, "messages[0].content[0]"),
    "a block of no type": ({"messages": [said({"text": "x"})]}, "messages[0].content[0].type"),
    "an image": (turns({"type": "image", "source": SOURCE}), "messages[1].content[0].type"),
    "a document": (turns({"type": "document", "source": SOURCE}), "messages[1].content[0].type"),
    "a hidden thought": (
        turns({"type": "redacted_thinking", "data": "x"}, role="assistant"),
        "messages[1].content[0].type",
    ),
    "a block without text": (turns({"type": "text"}), "messages[1].content[0].text"),
    "an unknown field": (turns({"type": "text", "text": "x", "a": 1}), "messages[1].content[0].a"),
    "a call of a user": (turns(USE), "messages[1].content[0].type"),
    "a result of the assistant": (
        turns({"type": "tool_result", "tool_use_id": "c"}, role="assistant"),
        "messages[1].content[0].type",
    ),
    "a result of no call": (turns({"type": "tool_result"}), "messages[1].content[0].tool_use_id"),
    "a result of an unknown call": (
        turns({"type": "tool_result", "tool_use_id": "d", "content": "x"}),
        "messages[1].content[0].tool_use_id",
    ),
    "an image of nothing as a result": (
        turns({"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "a": 1}]}),
        "messages[1].content[0].content[0].a",
    ),
    "arguments that are a text": (
        turns({**USE, "input": "{}"}, role="assistant"),
        "messages[1].content[0].input",
    ),
    "an answer that was begun": (
        {"messages": [USER, {"role": "assistant", "content": "x"}]},
        "messages[1].role",
    ),
    "a system of a number": ({"system": 5}, "system"),
    "a system with an image": ({"system": [{"type": "image", "source": SOURCE}]}, "system[0].type"),
    "no limit": ({"max_tokens": None}, "max_tokens"),
    "less than none": ({"max_tokens": 0}, "max_tokens"),
    "a limit that is a text": ({"max_tokens": "5"}, "max_tokens"),
    "a huge limit": ({"max_tokens": 10**30}, "max_tokens"),
    "an empty stop": ({"stop_sequences": [""]}, "stop_sequences"),
    "many stops": ({"stop_sequences": ["x"] * 1000}, "stop_sequences"),
    "a stop that is an object": ({"stop_sequences": {"a": 1}}, "stop_sequences"),
    "huge": ({"temperature": 1e300}, "temperature"),
    "a share": ({"top_p": -1}, "top_p"),
    "a rank": ({"top_k": "x"}, "top_k"),
    "a hosted tool": ({"tools": [{"type": "web_search_20260318", "name": "w"}]}, "tools[0].type"),
    "a shell": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type"),
    "a tool without a name": ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    "a tool's name": ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name"),
    "a schema that is a list": ({"tools": [{**TOOL, "input_schema": []}]}, "tools[0].input_schema"),
    "two tools of one name": ({"tools": [TOOL, TOOL]}, "tools"),
    "a choice that is a text": ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
    "an unknown choice": ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    "a choice of no name": ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    "a name without a choice": (
        {"tools": [TOOL], "tool_choice": {"type": "any", "name": "f"}},
        "tool_choice.name",
    ),
    "a tool that is not there": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "tool_choice",
    ),
    "a call of nothing": ({"tool_choice": {"type": "any"}}, "tool_choice"),
    "a small budget": (
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        "thinking.budget_tokens",
    ),
    "no budget": ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
    "a budget for nothing": (
        {"thinking": {"type": "disabled", "budget_tokens": 2048}},
        "thinking.budget_tokens",
    ),
    "an unknown form": (
        {"output_config": {"format": {"type": "xml", "a": 1}}},
        "output_config.format.type",
    ),
    "a form without its schema": (
        {"output_config": {"format": {"type": "json_schema"}}},
        "output_config.format.schema",
    ),
    "results taken out": (
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "a": 1}]}},
        "context_management.edits[0].type",
    ),
    "a container": ({"container": "c"}, "container"),
    "other servers": ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
    "an unknown field of the body": ({"max_token": 5}, "max_token"),
    "another model": ({"model": "x" * 1000}, "model"),
}
ROWS = [
    *(("/v1/responses", {"input": "x"}, *row) for row in RESPONSES.values()),
    *(("/v1/messages", {"messages": [USER], "max_tokens": 9}, *row) for row in MESSAGES.values()),
]
NAMES = [f"responses-{name}" for name in RESPONSES] + [f"messages-{name}" for name in MESSAGES]
TEMPLATE = ROOT / "tests" / "server" / "templates" / "tools.jinja"


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(config_of(TOKENIZER, TEMPLATE), lambda prompt, params: ["a"]) as server:
        yield server


@pytest.mark.parametrize(("path", "good", "fields", "param"), ROWS, ids=NAMES)
def test_a_body_with_a_wrong_field_names_it(
    server: ScriptedServer, path: str, good: dict[str, Any], fields: dict[str, Any], param: str
) -> None:
    before = server.engine.num_added
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        response = client.post(path, json={**good, **fields})
        assert 400 <= response.status_code < 500, response.text
        error = response.json()["error"]
        assert error["param"] == param, error
        assert len(error["message"]) <= 2000
        if path == "/v1/messages":
            assert response.json()["type"] == "error"
            assert param in error["message"]
        assert server.engine.num_added == before, "the engine heard of it"
        assert client.post(path, json=good).status_code == 200, "it goes on"
    server.wait_until(lambda: server.lifecycle.num_requests == 0)


def test_a_turn_of_many_calls_is_taken_or_refused(server: ScriptedServer) -> None:
    body = {"messages": [said(*[USE] * 1000, role="assistant"), USER], "max_tokens": 9}
    response = httpx.post(f"{server.url}/v1/messages", json=body, timeout=SECONDS)
    assert response.status_code in (200, 400), response.text


def test_a_turn_of_many_thoughts_takes_time_by_their_length() -> None:
    thoughts = [{"type": "thinking", "thinking": "x" * 4000}] * 2000
    body = {"messages": [said(*thoughts, role="assistant"), USER], "max_tokens": 9}
    given = parsed(MessagesBody, body)
    before = time.process_time()
    asked(given)
    assert time.process_time() - before < 0.5  # copying all of them for each takes five times that
