"""The server's doors over HTTP: who comes in, what they are told, and what is left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from predict.errors import UserError
from predict.request import SamplingParams
from tests.support.http_server import ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

TEMPLATE = (
    "{{ xml_tools | tojson if xml_tools }}{% for m in messages %}[{{ m.role }}]"
    "{{ m.reasoning_content }}{{ m.content }}{% endfor %}[assistant]"
)
WORDS = ("one", " two", " three")
ASK = {"prompt": "count", "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "count"}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    template = tmp_path_factory.mktemp("templates") / "plain.jinja"
    template.write_text(TEMPLATE)
    with ScriptedServer(config_of(TOKENIZER, template), lambda prompt, params: WORDS) as server:
        yield server


def events(response: httpx.Response) -> list[Any]:
    """What a stream's events hold; its last one is the text [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_a_completion_is_whole(client: httpx.Client, server: ScriptedServer) -> None:
    answer = client.post("/v1/completions", json={**ASK, "model": "test"}).json()
    assert answer["object"] == "text_completion"
    assert answer["model"] == "test"
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": "one two three",
        "logprobs": None,
        "finish_reason": "stop",
    }
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert not server.engine.added[-1][2], "a whole answer does not need pieces"


def test_several_prompts_and_answers_are_numbered_in_order(client: httpx.Client) -> None:
    body = {**ASK, "prompt": ["a", "b"], "n": 2, "temperature": 1.0}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    chunks = events(client.post("/v1/completions", json={**body, "stream": True}))
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["one two three"] * 4


def test_a_chat_stream_begins_with_the_role_and_ends_with_a_reason(client: httpx.Client) -> None:
    chunks = events(client.post("/v1/chat/completions", json={**CHAT, "stream": True}))
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["delta"].get("content", "") for each in deltas) == "one two three"
    assert [each["finish_reason"] for each in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1]["finish_reason"] == "stop"
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


def test_usage_of_a_stream_comes_in_a_last_chunk_alone(client: httpx.Client) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = events(client.post("/v1/chat/completions", json=body))
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0


def test_the_template_makes_the_prompt(client: httpx.Client, server: ScriptedServer) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    assert client.post("/v1/chat/completions", json={"messages": messages}).status_code == 200
    prompt = server.engine.tokenizer.decode(server.engine.added[-1][0], False)
    assert prompt == "[system]be brief[user]ab[assistant]"


def test_logprobs_have_the_texts_of_tokens(client: httpx.Client) -> None:
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    for stream in (False, True):
        response = client.post("/v1/chat/completions", json={**body, "stream": stream})
        parts = events(response) if stream else [response.json()]
        found = [
            entry
            for part in parts
            for choice in part["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert "".join(entry["token"] for entry in found) == "one two three"
        assert bytes(b for entry in found for b in entry["bytes"]) == b"one two three"
        assert all(entry["top_logprobs"][0]["logprob"] == -0.5 for entry in found)
    answer = client.post("/v1/completions", json={**ASK, "logprobs": 1}).json()
    measured = answer["choices"][0]["logprobs"]
    assert "".join(measured["tokens"]) == "one two three"
    text = answer["choices"][0]["text"]
    for token, offset in zip(measured["tokens"], measured["text_offset"], strict=True):
        assert text.startswith(token, offset)


def test_parameters_reach_the_engine(client: httpx.Client, server: ScriptedServer) -> None:
    body = {
        **CHAT,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_k": 3,
        "min_tokens": 2,
        "stop": ["x"],
        "seed": 4,
        "logit_bias": {"7": -2},
        "repetition_penalty": 1.1,
        "user": "somebody",
        "store": False,
        "top_p": None,
    }
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert server.engine.added[-1][1] == SamplingParams(
        max_new_tokens=5,
        temperature=0.5,
        top_k=3,
        min_length=2,
        stop=("x",),
        seed=4,
        logit_bias={7: -2.0},
        repetition_penalty=1.1,
    )


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ({"seed": -1}, {"seed": -1}),
        ({"seed": -(2**63)}, {"seed": -(2**63)}),
        ({"top_p": 0}, {"greedy": True}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"n": 2, "temperature": 0}, {"n": 2}),
        ({"verbosity": "medium"}, {}),
        ({"seed": 4.0, "max_tokens": 2.0}, {"seed": 4, "max_new_tokens": 2}),
        ({"include_reasoning": True, "return_token_ids": False, "add_special_tokens": False}, {}),
    ],
)
def test_values_that_openai_and_vllm_allow_are_taken(
    client: httpx.Client, server: ScriptedServer, given: dict[str, Any], taken: dict[str, Any]
) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, **given})
    assert response.status_code == 200, response.text
    params = server.engine.added[-1][1]
    assert {name: getattr(params, name) for name in taken} == taken


@pytest.mark.parametrize("echo", [False, True])
def test_an_answer_of_no_tokens_is_the_prompt_at_most_and_counts_none(
    client: httpx.Client, echo: bool
) -> None:
    body = {**ASK, "max_tokens": 0, "echo": echo}
    answer = client.post("/v1/completions", json=body).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("count" if echo else "", "length")
    assert answer["usage"]["completion_tokens"] == 0
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    first, last = events(client.post("/v1/completions", json={**body, **stream}))
    assert first["choices"] == [choice]
    assert last["usage"] == answer["usage"]


def test_a_stream_counts_in_each_chunk(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ASK, "stream": True, "stream_options": options}
    counts = [
        e["usage"]["completion_tokens"] for e in events(client.post("/v1/completions", json=body))
    ]
    assert counts == sorted(counts)
    assert 0 < counts[0] < counts[-1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failed", [(1,), (0,), (0, 1)])
def test_answers_that_fail_leave_their_siblings_alone(
    client: httpx.Client, server: ScriptedServer, stream: bool, failed: tuple[int, ...]
) -> None:
    server.engine.failed = failed
    try:
        body = {**ASK, "n": 2, "temperature": 1.0, "stream": stream}
        response = client.post("/v1/completions", json=body)
    finally:
        server.engine.failed = ()
    if len(failed) == 2:
        assert (response.status_code == 500) != stream
        assert "broken" in response.text
        return
    found = events(response) if stream else [response.json()]
    choices = [choice for each in found for choice in each["choices"]]
    ended = {
        c["index"]: (c["finish_reason"], c.get("error")) for c in choices if c["finish_reason"]
    }
    assert ended == {failed[0]: ("error", "broken"), 1 - failed[0]: ("stop", None)}


GUIDED: dict[str, dict[str, Any]] = {
    "json_schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}},
        }
    },
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"guided_regex": "a+"},
    "choice": {"structured_outputs": {"choice": ["a", "b"]}},
    "grammar": {"guide": {"grammar": 'start: "a"\n'}},
}


@pytest.mark.parametrize("kind", GUIDED)
def test_every_way_to_ask_for_a_form_is_a_guide(
    client: httpx.Client, server: ScriptedServer, kind: str
) -> None:
    response = client.post("/v1/chat/completions", json={**CHAT, **GUIDED[kind]})
    assert response.status_code == 200, response.text
    guide = server.engine.added[-1][1].guide
    assert guide is not None
    assert guide.kind == kind


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"content": "a", "reasoning": "Hm."}, "Hm.a"),
        ({"content": "a", "reasoning_content": "Hm."}, "Hm.a"),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "ab"),
    ],
)
def test_what_an_assistant_said_reaches_the_template(
    client: httpx.Client, said: dict[str, Any], shown: str
) -> None:
    body = {
        "messages": [{"role": "assistant", **said}, *CHAT["messages"]],
        "chat_template_kwargs": {"xml_tools": [{"name": "f"}]},
    }
    ids = client.post("/tokenize", json=body).json()["tokens"]
    prompt = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert prompt == f'[{{"name": "f"}}][assistant]{shown}[user]count[assistant]'


def test_two_forms_at_once_are_refused(client: httpx.Client) -> None:
    body = {**CHAT, **GUIDED["regex"], **GUIDED["json_object"]}
    error = client.post("/v1/chat/completions", json=body).json()["error"]
    assert error["param"] == "guided_regex"
    assert "response_format" in error["message"]


def test_a_prompt_that_is_too_long_is_told_before_the_engine_hears_of_it(
    client: httpx.Client, server: ScriptedServer
) -> None:
    before = server.engine.num_added
    for body in ({**ASK, "prompt": "word " * 400}, {**ASK, "prompt": [5] * 400}):
        response = client.post("/v1/completions", json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "prompt"
        assert "255" in error["message"]
    assert server.engine.num_added == before


def test_another_model_is_not_found(client: httpx.Client) -> None:
    response = client.post("/v1/completions", json={**ASK, "model": "tset"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "did you mean test?" in error["message"]
    assert client.get("/v1/models/test").json()["id"] == "test"
    assert client.get("/v1/models/other").status_code == 404
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["test"]


def test_what_the_engine_refuses_names_the_field(
    client: httpx.Client, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = UserError("max_new_tokens 9 is too much here")
    monkeypatch.setattr(server.engine, "script", lambda prompt, params: refusal)
    for stream in (False, True):
        response = client.post("/v1/completions", json={**ASK, "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "max_tokens"


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client) -> None:
    text = "hello wörld 🙂"
    answer = client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert answer["count"] == len(answer["tokens"])
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    of_chat = client.post("/tokenize", json=CHAT).json()["tokens"]
    prompt = client.post("/detokenize", json={"tokens": of_chat}).json()["prompt"]
    assert prompt == "[user]count[assistant]"


def test_echo_puts_the_prompt_in_front(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json={**ASK, "echo": True}).json()
    assert answer["choices"][0]["text"] == "countone two three"
    chunks = events(client.post("/v1/completions", json={**ASK, "echo": True, "stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "countone two three"


def test_request_ids_go_in_and_out(client: httpx.Client, server: ScriptedServer) -> None:
    response = client.post("/v1/completions", json=ASK, headers={"X-Request-Id": "mine-1"})
    assert response.headers["x-request-id"] == "mine-1"
    hostile = client.get("/health", headers={"X-Request-Id": 'x"y\tz'})
    assert re.fullmatch(r"req-[0-9a-f]{24}", hostile.headers["x-request-id"])
    server.wait_until(lambda: any("mine-1" in line for line in server.lines))
    (line,) = [json.loads(line) for line in server.lines if "mine-1" in line]
    assert line["status"] == 200
    assert line["path"] == "/v1/completions"
    assert line["prompt_tokens"] > 0
    assert "prompt" not in line, "what clients say is not logged unless asked for"


def test_an_unknown_path_and_a_wrong_method_are_errors_of_the_same_form(
    client: httpx.Client,
) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/static/../app.py", 404),
        ("GET", "/static/%2e%2e/app.py", 404),
    ):
        response = client.request(method, path)
        assert response.status_code == status, path
        assert response.json()["error"]["message"]


def test_the_page_may_load_nothing_from_elsewhere(client: httpx.Client) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    for path in re.findall(r'(?:src|href)="(static/[^"]+)"', response.text):
        found = client.get(f"/{path}")
        assert found.status_code == 200
        assert found.headers["x-content-type-options"] == "nosniff"


def test_no_page_of_another_origin_may_read_answers(client: httpx.Client) -> None:
    response = client.get("/v1/models", headers={"Origin": "https://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


def test_a_body_that_is_not_called_json_is_refused(client: httpx.Client) -> None:
    # What a web page of somebody else may send without being asked for leave.
    body = json.dumps(ASK)
    response = client.post("/v1/completions", content=body, headers={"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["error"]["message"]


def test_metrics_count_requests_by_route(client: httpx.Client) -> None:
    client.post("/v1/completions", json=ASK)
    client.get("/somewhere/else")
    text = client.get("/metrics").text
    assert 'regatta_http_requests_total{route="/v1/completions",status="200"}' in text
    assert 'route="other"' in text
    assert "somewhere" not in text
