"""PaddleNLP's clients: what they send is understood, and what they look for is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from predict.request import SamplingParams
from tests.server.conftest import TEMPLATE
from tests.support.http_server import ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

# As predict/request_flask_server.py sends it, in its older and its newer form.
OLD = {
    "context": "hello",
    "history": None,
    "top_k": 0,
    "top_p": 0.7,
    "temperature": 0.95,
    "repetition_penalty": 1.3,
    "max_length": 100,
    "src_length": 100,
    "min_length": 1,
}
NEW = {
    "messages": [{"role": "user", "content": "hello"}],
    "max_length": 100,
    "src_length": 100,
    "min_length": 1,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    def script(prompt: str, params: SamplingParams) -> list[str]:
        return ["one", " two"]

    with ScriptedServer(config_of(TOKENIZER, TEMPLATE), script) as server:
        yield server


def asked(server: ScriptedServer) -> tuple[str, SamplingParams]:
    """The prompt and the parameters that the engine got last."""
    prompt, params, _ = server.engine.added[-1]
    return server.engine.tokenizer.decode(prompt, False), params


def test_api_chat_answers_in_lines_of_json(client: httpx.Client, server: ScriptedServer) -> None:
    lines = [json.loads(line) for line in client.post("/api/chat", json=OLD).text.splitlines()]
    assert all(line["error_code"] == 0 for line in lines)
    responses = [line["result"]["response"] for line in lines]
    assert "".join(each["utterance"] for each in responses) == "one two"
    assert {each["role"] for each in responses} == {"bot"}
    prompt, params = asked(server)
    assert prompt == "[user]hello[assistant]"
    assert params == SamplingParams(
        top_p=0.7, temperature=0.95, repetition_penalty=1.3, max_new_tokens=100, min_length=1
    )


HISTORIES: dict[str, Any] = {
    "texts": ["a", "b"],
    "objects": [{"utterance": "a"}, {"role": "bot", "utterance": "b"}],
    "JSON as a text": '["a", "b"]',
}


@pytest.mark.parametrize("kind", HISTORIES)
def test_history_comes_before_the_question(
    client: httpx.Client, server: ScriptedServer, kind: str
) -> None:
    body = {**OLD, "history": HISTORIES[kind]}
    assert client.post("/api/chat", json=body).status_code == 200
    assert asked(server)[0] == "[user]a[assistant]b[user]hello[assistant]"


def test_the_newer_form_streams_events_with_messages(client: httpx.Client) -> None:
    response = client.post("/v1/chat/completions", json=NEW)
    *events, done = [line for line in response.text.split("\n") if line.startswith("data:")]
    assert done == "data: [DONE]"
    text = ""
    for event in events:
        (choice,) = json.loads(event[5:])["choices"]
        text += choice["message"]["content"]
        assert choice["delta"] == choice["message"]
    assert text == "one two"


def test_the_newer_form_is_whole_when_asked_to_be(client: httpx.Client) -> None:
    answer = client.post("/v1/chat/completions", json={**NEW, "stream": False}).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "one two"


def test_top_p_zero_is_greedy_as_in_paddlenlp(client: httpx.Client, server: ScriptedServer) -> None:
    assert client.post("/api/chat", json={**OLD, "top_p": 0.0}).status_code == 200
    assert asked(server)[1].greedy


def test_a_prompt_is_cut_at_src_length(client: httpx.Client, server: ScriptedServer) -> None:
    body = {**OLD, "context": "hello " * 30, "src_length": 4}
    assert client.post("/api/chat", json=body).status_code == 200
    assert len(server.engine.added[-1][0]) == 4


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "more than the model holds": ("/api/chat", {**OLD, "src_length": 200, "max_length": 200}),
    "half a history": ("/api/chat", {**OLD, "history": ["a"]}),
    "a history of numbers": ("/api/chat", {**OLD, "history": [1, 2]}),
    "no question": ("/api/chat", {**OLD, "context": None}),
    "an unknown field": ("/api/chat", {**OLD, "contxt": "x"}),
    "no prompt": ("/v1/chat/completions", {"req_id": "a"}),
    "two prompts": ("/v1/chat/completions", {"text": "a", "input_ids": [5]}),
    "a share above 1": ("/v1/completions", {"text": "a", "topp": 2}),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_have_a_code_and_a_message(client: httpx.Client, name: str) -> None:
    path, body = WRONG[name]
    response = client.post(path, json=body)
    assert response.status_code == 400
    answer = response.json()
    assert answer["error_code"] == 1
    assert answer["error_msg"] == answer["error"]["message"]
    assert answer["error"]["param"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_llm_servers_form_is_answered_in_its_own(
    client: httpx.Client, server: ScriptedServer, path: str
) -> None:
    body = {
        "req_id": "r1",
        "text": "hello",
        "max_dec_len": 9,
        "topp": 0.5,
        "penalty_score": 1.2,
        "eos_token_ids": [7],
        "stop_sequences": ["x"],
        "return_usage": True,
        "benchmark": False,
    }
    answer = client.post(path, json=body).json()
    assert (answer["result"], answer["error_code"], answer["error_msg"]) == ("one two", 0, "")
    assert answer["usage"]["completion_tokens"] > 0
    assert asked(server) == (
        "hello",
        SamplingParams(
            max_new_tokens=9, top_p=0.5, repetition_penalty=1.2, stop_token_ids=(7,), stop="x"
        ),
    )
    lines = client.post(path, json={**body, "stream": True}).text.splitlines()
    pieces = [json.loads(line) for line in lines]
    assert "".join(piece["token"] for piece in pieces) == "one two"
    assert [piece["send_idx"] for piece in pieces] == list(range(len(pieces)))
    assert [piece["is_end"] for piece in pieces] == [0] * (len(pieces) - 1) + [1]
    assert {piece["req_id"] for piece in pieces} == {"r1"}
    assert pieces[-1]["usage"] == answer["usage"]


def test_llm_servers_messages_and_token_ids(client: httpx.Client, server: ScriptedServer) -> None:
    body = {"messages": NEW["messages"], "system": "be brief", "max_dec_len": 5}
    assert client.post("/v1/chat/completions", json=body).json()["result"] == "one two"
    assert asked(server)[0] == "[system]be brief[user]hello[assistant]"
    assert client.post("/v1/chat/completions", json={"input_ids": [5, 6]}).status_code == 200
    assert server.engine.added[-1][0] == [5, 6]


def test_its_own_base_url_and_health_checks(client: httpx.Client) -> None:
    base = "/v1/chat/completions"
    chat = client.post(f"{base}/chat/completions", json={"messages": NEW["messages"]}).json()
    assert chat["choices"][0]["message"]["content"] == "one two"
    text = client.post(f"{base}/completions", json={"prompt": "hello"}).json()
    assert text["choices"][0]["text"] == "one two"
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert client.get(path).status_code == 200
