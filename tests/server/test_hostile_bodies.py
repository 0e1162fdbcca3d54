"""Malformed and hostile bodies: each is a 4xx that says where, and the server goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.http_server import ScriptedServer

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"properties": {"a": value}}
    return value


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


# Texts that are sent as they are, and a word of the message.
RAW: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not valid JSON"),
    "no JSON": (b"hello", "not valid JSON"),
    "cut short": (b'{"prompt": "a"', "cut short"),
    "a list": (b"[]", "object"),
    "a text": (b'"prompt"', "object"),
    "null": (b"null", "object"),
    "no UTF-8": (b'{"prompt": "\xff\xfe"}', "UTF-8"),
    "UTF-16": ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
    "half a pair": (b'{"prompt": "\\ud800"}', "surrogate"),
    "half a pair as a key": (b'{"prompt": "a", "\\udc00": 1}', "surrogate"),
    "a key twice": (b'{"prompt": "a", "prompt": "b"}', "twice"),
    "NaN": (b'{"prompt": "a", "temperature": NaN}', "NaN"),
    "Infinity": (b'{"prompt": "a", "temperature": -Infinity}', "Infinity"),
    "beyond a float": (b'{"prompt": "a", "temperature": 1e999}', "1e999"),
    "many digits": (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "digits"),
    "deep lists": (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "values|nested"),
    "deep objects": (b'{"a":' * 200 + b"1" + b"}" * 200, "nested"),
    "many values": (b'{"prompt": [' + b"[]," * 300_000 + b"[]]}", "values"),
    "many keys": (
        b"{" + b",".join(b'"%d":0' % i for i in range(200_000)) + b"}",
        "values",
    ),
    "10 MB": (b'{"prompt": "' + b"a" * (10 << 20) + b'"}', "bytes"),
    "a control character": (b'{"prompt": "a\x00b"}', "control"),
    "a comment": (b'{"prompt": "a"} // more', "not valid JSON"),
    "a single quote": (b"{'prompt': 'a'}", "not valid JSON"),
}

# Fields of a completion, and the field that is named.
COMPLETION: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({}, "prompt"),
    "null": ({"prompt": None}, "prompt"),
    "a number": ({"prompt": 5}, "prompt"),
    "an object": ({"prompt": {"a": 1}}, "prompt"),
    "no prompts": ({"prompt": []}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 500}, "prompt"),
    "an empty one": ({"prompt": ["a", []]}, "prompt[1]"),
    "mixed": ({"prompt": ["a", {"b": 1}]}, "prompt[1]"),
    "a token below 0": ({"prompt": [5, -1]}, "prompt"),
    "a token of a larger vocabulary": ({"prompt": [5, 10**6]}, "prompt"),
    "a huge token": ({"prompt": [5, 10**30]}, "prompt"),
    "a boolean among tokens": ({"prompt": [5, True]}, "prompt"),
    "fractions of tokens": ({"prompt": [[1.5]]}, "prompt"),
    "a long text": ({"prompt": "word " * 100_000}, "prompt"),
    "a long word": ({"prompt": "a" * 1_000_000}, "prompt"),
    "spaces": ({"prompt": " " * 1_000_000}, "prompt"),
    "an unknown field": ({"prompt": "a", "temprature": 1}, "temprature"),
    "a field of a Python object": ({"prompt": "a", "__class__": "x"}, "__class__"),
    "a field of a model": ({"prompt": "a", "model_fields": {}}, "model_fields"),
    "a long name of a field": ({"prompt": "a", "x" * 100_000: 1}, "x" * 80),
    "less than none": ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
    "a text as a number": ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
    "a boolean as a number": ({"prompt": "a", "max_tokens": True}, "max_tokens"),
    "a list as a number": ({"prompt": "a", "temperature": [1]}, "temperature"),
    "below zero": ({"prompt": "a", "temperature": -1}, "temperature"),
    "huge": ({"prompt": "a", "temperature": 1e300}, "temperature"),
    "a share above 1": ({"prompt": "a", "top_p": 1.5}, "top_p"),
    "a huge n": ({"prompt": "a", "n": 10**9}, "n"),
    "n within a request": ({"prompt": "a", "n": 1000}, "n"),
    "best_of below n": ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
    "best_of streamed": ({"prompt": "a", "best_of": 3, "stream": True}, "best_of"),
    "many logprobs": ({"prompt": "a", "logprobs": 10**6}, "logprobs"),
    "a huge seed below 0": ({"prompt": "a", "seed": -(2**70)}, "seed"),
    "a huge seed": ({"prompt": "a", "seed": 2**70}, "seed"),
    "an empty stop": ({"prompt": "a", "stop": [""]}, "stop"),
    "many stops": ({"prompt": "a", "stop": ["x"] * 1000}, "stop"),
    "a long stop": ({"prompt": "a", "stop": "x" * 100_000}, "stop"),
    "an object as stop": ({"prompt": "a", "stop": {"a": 1}}, "stop"),
    "a bias of no token": ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    "a bias that is a text": ({"prompt": "a", "logit_bias": {"5": "x"}}, "logit_bias"),
    "many biases": (
        {"prompt": "a", "logit_bias": {str(i): 1 for i in range(20_000)}},
        "logit_bias",
    ),
    "bad words": ({"prompt": "a", "bad_words": [[]]}, "bad_words"),
    "many beams": ({"prompt": "a", "num_beams": 500}, "num_beams"),
    "stream as a text": ({"prompt": "a", "stream": "yes"}, "stream"),
    "options without a stream": ({"prompt": "a", "stream_options": {}}, "stream_options"),
    "unknown options": (
        {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
        "stream_options.usage",
    ),
    "a suffix": ({"prompt": "a", "suffix": "b"}, "suffix"),
    "embeddings": ({"prompt": "a", "prompt_embeds": "gASV"}, "prompt_embeds"),
    "code": ({"prompt": "a", "logits_processors": ["os.system"]}, "logits_processors"),
    "another model": ({"prompt": "a", "model": "x" * 1000}, "model"),
    "a model that is a list": ({"prompt": "a", "model": ["test"]}, "model"),
    "a limit twice": ({"prompt": "a", "max_tokens": 4, "max_new_tokens": 5}, "max_new_tokens"),
    "min above max": ({"prompt": "a", "max_tokens": 4, "min_tokens": 5}, "min_tokens"),
}

# Fields beside `messages` of a chat, or messages, and the field that is named.
CHAT: dict[str, tuple[dict[str, Any], str]] = {
    "no messages": ({"messages": []}, "messages"),
    "messages as a text": ({"messages": "hello"}, "messages"),
    "a message as a text": ({"messages": ["hello"]}, "messages[0]"),
    "many messages": ({"messages": [USER] * 5000}, "messages"),
    "more messages than tokens": ({"messages": [USER] * 300}, "messages"),
    "an unknown role": ({"messages": [{"role": "root", "content": "x"}]}, "messages[0].role"),
    "no role": ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
    "no content": ({"messages": [{"role": "user"}]}, "messages[0].content"),
    "a number as content": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    "an image": (
        {"messages": [{"role": "user", "content": [IMAGE]}]},
        "messages[0].content[0].type",
    ),
    "sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].type",
    ),
    "many parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2000}]},
        "messages[0].content",
    ),
    "a part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    "an unknown field": ({"messages": [{**USER, "contents": "x"}]}, "messages[0].contents"),
    "a call of a user": (
        {"messages": [{**call("{}"), "role": "user", "content": "x"}]},
        "messages[0].tool_calls",
    ),
    "arguments that are an object": (
        {"messages": [USER, call({})]},
        "messages[1].tool_calls[0].function.arguments",
    ),
    "a long conversation": ({"messages": [{**USER, "content": "word " * 99_000}]}, "messages"),
    "a template": ({"chat_template": "{{ ''.__class__ }}"}, "chat_template"),
    "template values": ({"chat_template_kwargs": [1]}, "chat_template_kwargs"),
    "a template's own value": (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages",
    ),
    "audio": ({"audio": {"voice": "x"}}, "audio"),
    "modalities": ({"modalities": ["text", "audio"]}, "modalities"),
    "functions": ({"functions": [TOOL["function"]]}, "functions"),
    "top_logprobs alone": ({"top_logprobs": 5}, "top_logprobs"),
    "tools as an object": ({"tools": TOOL}, "tools"),
    "a tool of another type": ({"tools": [{"type": "browser"}]}, "tools[0].type"),
    "a tool without a name": (
        {"tools": [{"type": "function", "function": {}}]},
        "tools[0].function.name",
    ),
    "a tool's name": (
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        "tools[0].function",
    ),
    "parameters that are a list": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    "two tools of one name": ({"tools": [TOOL, TOOL]}, "tools"),
    "large tools": (
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 99_999}}]},
        "tools",
    ),
    "many tools": (
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(600)]},
        "tools",
    ),
    "a choice of no tool": ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    "a call of nothing": ({"tool_choice": "required"}, "tool_choice"),
    "a tool that is not there": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    "tools with all of an answer": (
        {"tools": [TOOL], "guide": {"regex": "a", "around": "start: @content"}},
        "guide",
    ),
    "a tool of OpenAI's other kind": (
        {"tools": [{"type": "custom", "custom": {}}]},
        "tools[0].custom",
    ),
    "a function beside its field": (
        {"tools": [{"type": "function", "name": "f", "parameters": {}}]},
        "tools[0].name",
    ),
    "thoughts left out": ({"include_reasoning": False}, "include_reasoning"),
    "a template's switch": ({"enable_thinking": False}, "enable_thinking"),
    "half a token": ({"max_tokens": 4.5}, "max_tokens"),
    "allowed tools that are not there": (
        {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{}]}},
        "tool_choice",
    ),
    "an unknown form": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "a form without its schema": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema.schema",
    ),
    "a schema that is a number": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        "response_format.json_schema.schema",
    ),
    "a deep schema": ({"guided_json": json.dumps(nested(40))}, "guided_json"),
    "a large schema": ({"guided_json": {"enum": ["x" * 99_999]}}, "guided_json"),
    "a schema that is no JSON": ({"guided_json": "{"}, "guided_json"),
    "a large expression": ({"guided_regex": "(a|b)" * 9999}, "guided_regex"),
    "no choices": ({"guided_choice": []}, "guided_choice"),
    "an empty choice": ({"guided_choice": ["a", ""]}, "guided_choice"),
    "an empty grammar": ({"guided_grammar": ""}, "guided_grammar"),
    "two forms": ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    "an unknown guide": ({"guide": {"xml": "x"}}, "guide"),
    "a guide that is a text": ({"guide": "json"}, "guide"),
}


@pytest.fixture(autouse=True)
def goes_on(server: ScriptedServer, client: httpx.Client) -> Iterator[None]:
    before = server.engine.num_added
    yield
    assert server.engine.num_added == before, "the engine heard of it"
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    server.wait_until(lambda: server.lifecycle.num_requests == 0)


def refused(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, which is a client's."""
    assert 400 <= response.status_code < 500, response.text
    error: dict[str, Any] = response.json()["error"]
    assert len(error["message"]) <= 2000
    return error


@pytest.mark.parametrize("name", RAW)
def test_a_text_that_is_no_request_is_refused(client: httpx.Client, name: str) -> None:
    body, said = RAW[name]
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/api/chat"):
        response = client.post(path, content=body, headers={"Content-Type": "application/json"})
        error = refused(response)
        assert any(word in error["message"] for word in said.split("|")), error


@pytest.mark.parametrize("name", COMPLETION)
def test_a_completion_with_a_wrong_field_names_it(client: httpx.Client, name: str) -> None:
    body, param = COMPLETION[name]
    assert refused(client.post("/v1/completions", json=body))["param"] == param


@pytest.mark.parametrize("name", CHAT)
def test_a_chat_with_a_wrong_field_names_it(client: httpx.Client, name: str) -> None:
    body, param = CHAT[name]
    response = client.post("/v1/chat/completions", json={"messages": [USER], **body})
    assert refused(response)["param"] == param
