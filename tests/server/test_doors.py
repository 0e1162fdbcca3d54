"""The clients of OpenAI's Responses API and of the Messages API, unchanged, at the same server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal, get_args

import httpx
import openai
import pytest
from openai.types.responses import ResponseItemList, ResponseStreamEvent
from pydantic import BaseModel

from predict.config.engine import EngineConfig
from predict.request import SamplingParams
from predict.server.answer_blocks import unsealed
from predict.server.config import ServerConfig
from predict.server.messages import MessagesBody
from predict.server.messages import asked as messages_asked
from predict.server.protocol import parsed
from predict.server.responses import ResponsesBody
from predict.server.responses import asked as responses_asked
from tests.server.conftest import TEMPLATE
from tests.support.http_server import SECONDS, ModelServer, ScriptedServer, config_of
from tests.support.paths import DEMO, ROOT
from tests.support.tiny import TOKENIZER

anthropic = pytest.importorskip("anthropic", reason="needs anthropic: pip install -e '.[test]'")

QUESTION = "def gcd(a, b):"
ASK = "How warm is it in Rome and Oslo?"
PLACE = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
FUNCTION: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a place.",
    "parameters": PLACE,
}
TOOL: dict[str, Any] = {"name": "weather", "input_schema": PLACE}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "%s"}}\n</tool_call>'
SUM = "Warm in Rome, cold in Oslo."


def script(prompt: str, params: SamplingParams) -> list[str]:
    """Calls for each place that it was not told of yet, thinks first, and sums up."""
    if "[tools]" not in prompt:
        return ["<think>hm</think>", "no tools", " here"]
    places = [place for place in ("Rome", "Oslo") if f"{place}: " not in prompt]
    if len(places) == 2 and "both" in prompt:
        text = "<think>two</think>See:" + CALL % "Rome" + CALL % "Oslo"
    else:
        text = f"<think>{places[0]} is missing</think>" + CALL % places[0] if places else SUM
    return [text[i : i + 7] for i in range(0, len(text), 7)]


@pytest.fixture(scope="module")
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(config_of(TOKENIZER, TEMPLATE, 4096), script) as server:
        yield server


@pytest.fixture(scope="module")
def responses(server: ScriptedServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS) as client:
        yield client.responses


@pytest.fixture(scope="module")
def messages(server: ScriptedServer) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", timeout=SECONDS) as client:
        yield client.messages


def heard(place: str) -> str:
    return f"{place}: {20 if place == 'Rome' else 2} degrees"


def asked_of(server: ScriptedServer) -> str:
    """The prompt that the engine had last."""
    return server.engine.tokenizer.decode(server.engine.added[-1][0], False)


# The same as chat


@pytest.fixture(scope="module")
def demo() -> Iterator[ModelServer]:
    engine = EngineConfig(
        model_name_or_path=str(DEMO),
        dtype="float32",
        chat_template=str(ROOT / "examples" / "demo_template.jinja"),
        attention="append",
        batch_size=32,
        max_length=192,
    )
    with ModelServer(ServerConfig(engine=engine, api_keys=("a-key",))) as server:
        yield server


class Doors:
    """The three doors of a server, by their clients."""

    def __init__(self, server: ModelServer) -> None:
        options: dict[str, Any] = {"api_key": "a-key", "timeout": SECONDS, "max_retries": 0}
        self.openai = openai.AsyncOpenAI(base_url=f"{server.url}/v1", **options)
        self.anthropic = anthropic.AsyncAnthropic(base_url=server.url, **options)

    async def chat(self, stream: bool, text: str = QUESTION) -> str:
        asked: Any = {"model": "demo_model", "temperature": 0, "max_tokens": 24}
        asked["messages"] = [{"role": "user", "content": text}]
        if not stream:
            whole = await self.openai.chat.completions.create(**asked)
            return whole.choices[0].message.content or ""
        chunks = await self.openai.chat.completions.create(**asked, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def responses(self, stream: bool, text: str = QUESTION) -> str:
        asked: Any = {"model": "demo_model", "temperature": 0, "max_output_tokens": 24}
        if not stream:
            return (await self.openai.responses.create(**asked, input=text)).output_text
        events = await self.openai.responses.create(**asked, input=text, stream=True)
        deltas = [e.delta async for e in events if e.type == "response.output_text.delta"]
        return "".join(deltas)

    async def messages(self, stream: bool, text: str = QUESTION) -> str:
        asked: Any = {"model": "demo_model", "max_tokens": 24, "extra_body": {"temperature": 0}}
        asked["messages"] = [{"role": "user", "content": text}]
        if not stream:
            whole = await self.anthropic.messages.create(**asked)
            return "".join(block.text for block in whole.content)
        async with self.anthropic.messages.stream(**asked) as events:
            return "".join([text async for text in events.text_stream])

    async def __aenter__(self) -> Doors:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.openai.close()
        await self.anthropic.close()


def test_a_question_has_one_answer_at_all_doors_streamed_or_not(demo: ModelServer) -> None:
    async def ask() -> list[str]:
        async with Doors(demo) as doors:
            made = (doors.chat, doors.responses, doors.messages)
            return [await door(stream) for door in made for stream in (False, True)]

    texts = asyncio.run(ask())
    assert len(texts[0]) > 20
    assert texts == [texts[0]] * 6


@pytest.mark.slow
def test_64_requests_in_flight_at_all_doors_are_all_answered(demo: ModelServer) -> None:
    async def ask() -> tuple[str, list[str]]:
        async with Doors(demo) as doors:
            made = (doors.chat, doors.responses, doors.messages)
            alone = await doors.chat(False)
            several = (made[i % 3](bool(i // 3 % 2)) for i in range(64))
            return alone, list(await asyncio.gather(*several))

    alone, texts = asyncio.run(ask())
    assert texts == [alone] * 64


class Answer(BaseModel):
    name: Literal["gcd", "lcm"]
    tags: list[Literal["a", "b"]]


def test_a_schema_comes_back_parsed(demo: ModelServer) -> None:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="a-key", timeout=SECONDS) as client:
        made = client.responses.parse(
            model="demo_model", input=QUESTION, text_format=Answer, temperature=0
        )
    with anthropic.Anthropic(base_url=demo.url, auth_token="a-key", timeout=SECONDS) as client:
        message = client.messages.parse(
            model="demo_model",
            max_tokens=300,
            messages=[{"role": "user", "content": QUESTION}],
            output_format=Answer,
            extra_body={"temperature": 0},
        )
    assert isinstance(made.output_parsed, Answer)
    assert message.parsed_output == made.output_parsed


def test_a_stop_sequence_and_the_end_of_the_room_are_told(demo: ModelServer) -> None:
    def made(stream: bool, **fields: Any) -> Any:
        body = {"max_tokens": 64, "temperature": 0, "stream": stream, **fields}
        body.setdefault("messages", [{"role": "user", "content": QUESTION}])
        headers = {"X-Api-Key": "a-key"}
        url = f"{demo.url}/v1/messages"
        response = httpx.post(url, json=body, headers=headers, timeout=SECONDS)
        assert response.status_code == 200, response.text
        if not stream:
            return response.json()
        events = [
            json.loads(line[6:]) for line in response.text.split("\n") if line[:6] == "data: "
        ]
        texts = [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
        return {"content": [{"text": "".join(texts)}], **events[-2]["delta"]}

    for stream in (False, True):
        whole = made(stream)["content"][0]["text"]
        word = whole.split()[3]
        message = made(stream, stop_sequences=["no such text", word])
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", word)
        assert message["content"][0]["text"] == whole[: whole.index(word)]
        assert made(stream, max_tokens=2)["stop_reason"] == "max_tokens"
    turns = [{"role": "user", "content": "x = 1\n" * 9}]
    message = made(False, max_tokens=100_000, messages=turns)
    assert message["stop_reason"] == "model_context_window_exceeded"


def test_a_response_that_is_cut_says_so(demo: ModelServer) -> None:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="a-key", timeout=SECONDS) as client:
        asked: Any = {"model": "demo_model", "input": QUESTION, "max_output_tokens": 2}
        made = client.responses.create(**asked)
        assert (made.status, made.output[0].status) == ("incomplete", "incomplete")
        assert made.incomplete_details.reason == "max_output_tokens"
        *_, last = client.responses.create(**asked, stream=True)
        assert last.type == "response.incomplete"
        assert last.response.usage.output_tokens == 2


# Tools over three turns


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
def test_responses_call_tools_over_three_turns(responses: Any, stream: bool, keeps: bool) -> None:
    """keeps: the server holds the conversation; else the client sends all of it each time."""
    items: list[Any] = [{"role": "user", "content": ASK}]
    called: list[str] = []
    previous = None
    for _ in range(3):
        asked: dict[str, Any] = {"model": "test", "input": items, "tools": [FUNCTION]}
        asked |= {"store": keeps, "previous_response_id": previous}
        if stream:
            with responses.stream(**asked) as events:
                made = events.until_done().get_final_response()
        else:
            made = responses.create(**asked)
        if keeps:
            previous, items = made.id, []
        else:
            items += made.output
        for item in made.output:
            if item.type == "function_call":
                place = json.loads(item.arguments)["place"]
                called.append(place)
                output = {"type": "function_call_output", "call_id": item.call_id}
                items.append({**output, "output": heard(place)})
    assert called == ["Rome", "Oslo"]
    assert made.output_text == SUM
    assert made.status == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_tools_over_three_turns(messages: Any, stream: bool) -> None:
    turns: list[Any] = [{"role": "user", "content": ASK}]
    called: list[str] = []
    for _ in range(3):
        asked: dict[str, Any] = {"model": "test", "max_tokens": 200, "tools": [TOOL]}
        asked["messages"] = turns
        if stream:
            with messages.stream(**asked) as events:
                made = events.get_final_message()
        else:
            made = messages.create(**asked)
        turns.append({"role": "assistant", "content": made.content})
        results = []
        for block in made.content:
            if block.type == "thinking":
                assert block.thinking.endswith("is missing")
                assert block.signature
            if block.type == "tool_use":
                assert made.stop_reason == "tool_use"
                place = block.input["place"]
                called.append(place)
                result = {"type": "tool_result", "tool_use_id": block.id}
                results.append({**result, "content": heard(place)})
        turns.append({"role": "user", "content": results})
    assert called == ["Rome", "Oslo"]
    assert (made.content[-1].text, made.stop_reason) == (SUM, "end_turn")


def test_the_three_doors_make_one_prompt_of_a_conversation(
    server: ScriptedServer, responses: Any, messages: Any
) -> None:
    """What was called, heard and thought is told alike."""
    call, result = ("c1", "weather", '{"place": "Rome"}'), heard("Rome")
    function = {"name": call[1], "arguments": call[2]}
    chat: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": ASK},
        {
            "role": "assistant",
            "content": "See.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": call[0], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call[0], "content": result},
        {"role": "user", "content": "Well?"},
    ]
    tool = {name: FUNCTION[name] for name in ("name", "description", "parameters")}
    body = {"messages": chat, "tools": [{"type": "function", "function": tool}]}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS)
    prompt = asked_of(server)
    responses.create(
        model="test",
        instructions="Be brief.",
        tools=[FUNCTION],
        input=[
            {"role": "user", "content": ASK},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"role": "assistant", "content": [{"type": "output_text", "text": "See."}]},
            dict(zip(("call_id", "name", "arguments"), call, strict=True), type="function_call"),
            {"type": "function_call_output", "call_id": call[0], "output": result},
            {"role": "user", "content": "Well?"},
        ],
    )
    assert asked_of(server) == prompt
    use = {"type": "tool_use", "id": call[0], "name": call[1], "input": json.loads(call[2])}
    messages.create(
        model="test",
        max_tokens=9,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        tools=[{**TOOL, "description": tool["description"]}],
        messages=[
            {"role": "user", "content": ASK},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "any"},
                    {"type": "text", "text": "See."},
                    use,
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": call[0], "content": result},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
    )
    assert asked_of(server) == prompt


def test_texts_between_calls_stay_in_their_answer(server: ScriptedServer) -> None:
    text = "See:" + CALL % "Rome" + " and" + CALL % "Oslo" + " now"
    server.engine.script = lambda prompt, params: [text]
    with httpx.Client(base_url=f"{server.url}/v1", timeout=SECONDS) as client:
        made = client.post("/responses", json={"input": ASK, "tools": [FUNCTION]}).json()
        names = [item["type"] for item in made["output"]]
        assert names == ["message", "function_call"] * 2 + ["message"]
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "x"}
            for item in made["output"]
            if item["type"] == "function_call"
        ]
        more = {"input": results, "previous_response_id": made["id"], "tools": [FUNCTION]}
        client.post("/responses", json=more)
        prompt = asked_of(server)
        body: dict[str, Any] = {"max_tokens": 99, "messages": [{"role": "user", "content": ASK}]}
        body["tools"] = [{**TOOL, "description": FUNCTION["description"]}]
        content = client.post("/messages", json=body).json()["content"]
        heard = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "x"}
            for block in content
            if block["type"] == "tool_use"
        ]
        turns = [("assistant", content), ("user", heard)]
        body["messages"] += [{"role": role, "content": said} for role, said in turns]
        client.post("/messages", json=body)
    server.engine.script = script
    ids = re.compile(r"call_\w+")
    assert ids.sub("", prompt) == ids.sub("", asked_of(server))


@pytest.mark.parametrize(
    ("of_responses", "of_messages"),
    [
        ("required", {"type": "any"}),
        ({"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}),
        ("none", {"type": "none"}),
    ],
)
def test_a_choice_of_tools_is_that_of_chat(
    server: ScriptedServer, responses: Any, messages: Any, of_responses: Any, of_messages: Any
) -> None:
    named = of_responses
    if isinstance(named, dict):
        named = {"type": "function", "function": {"name": "weather"}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
    body = {"messages": [{"role": "user", "content": ASK}], "tools": [tool], "tool_choice": named}
    httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=SECONDS)
    guide = server.engine.added[-1][1].guide
    assert (guide is None) == (named == "none")
    responses.create(input=ASK, tools=[FUNCTION], tool_choice=of_responses)
    assert server.engine.added[-1][1].guide == guide
    turns = [{"role": "user", "content": ASK}]
    messages.create(
        model="test", max_tokens=9, messages=turns, tools=[TOOL], tool_choice=of_messages
    )
    assert server.engine.added[-1][1].guide == guide


# Bodies as Codex CLI and Claude Code send them
CODEX: dict[str, Any] = {
    "model": "test",
    "instructions": "You are a coding agent.",
    "input": [
        {
            "type": "message",
            "role": "developer",
            "content": [{"type": "input_text", "text": "Permissions: read only."}],
        },
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "List the files."}],
        },
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": "{}", "call_id": "c1"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
    ],
    "tools": [{**FUNCTION, "name": "shell", "strict": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "client_metadata": {"originator": "cli"},
}
EPHEMERAL = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
CLAUDE: dict[str, Any] = {
    "model": "test",
    "max_tokens": 32000,
    "system": [
        {"type": "text", "text": "You are a coding agent.", **EPHEMERAL},
        {"type": "text", "text": "\nBe brief.", **EPHEMERAL},
    ],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "List the files."}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "So.", "signature": "s"},
                {"type": "tool_use", "id": "c1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "a.py"}],
                    "is_error": False,
                    **EPHEMERAL,
                }
            ],
        },
    ],
    "tools": [{**TOOL, "name": "Bash", "eager_input_streaming": True, **EPHEMERAL}],
    "metadata": {"user_id": "user_1"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/responses", CODEX), ("/v1/messages?beta=true", CLAUDE)]
)
def test_a_coding_agents_body_is_taken(server: ScriptedServer, path: str, body: Any) -> None:
    server.engine.script = lambda prompt, params: ["x"]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "any-2026-01-01"}
    response = httpx.post(server.url + path, json=body, headers=headers, timeout=SECONDS)
    server.engine.script = script
    events = events_of(response)
    assert events[-1]["type"] in ("response.completed", "message_stop")
    assert "a.py" in asked_of(server)


def test_items_are_kept_as_the_published_ones_and_go_on(server: ScriptedServer) -> None:
    with httpx.Client(base_url=f"{server.url}/v1", timeout=SECONDS) as client:
        body = {**CODEX, "stream": False, "store": True}
        made = client.post("/responses", json=body).json()
        prompt = asked_of(server)
        kept = client.get(f"/responses/{made['id']}/input_items", params={"order": "asc"}).json()
        more = {"input": "Well?", "previous_response_id": made["id"]}
        client.post("/responses", json={**body, **more})
    ResponseItemList.model_validate(kept)
    names = ["message"] * 2 + ["reasoning", "function_call", "function_call_output"]
    assert [item["type"] for item in kept["data"]] == names
    assert asked_of(server).startswith(prompt)


# Events


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, each under the name of its type."""
    assert response.status_code == 200, response.text
    found = []
    for event in response.text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        found.append(value)
    return found


def models_of(union: Any) -> dict[str, type[BaseModel]]:
    """The classes of a union of events, by the type that each says."""
    return {get_args(each.model_fields["type"].annotation)[0]: each for each in union}


BOTH = "both? " + ASK


def test_events_of_responses_are_the_published_ones_in_their_order(server: ScriptedServer) -> None:
    body = {"input": BOTH, "tools": [FUNCTION], "stream": True}
    events = events_of(httpx.post(f"{server.url}/v1/responses", json=body, timeout=SECONDS))
    models = models_of(get_args(get_args(ResponseStreamEvent)[0]))
    for event in events:
        models[event["type"]].model_validate(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = " ".join(event["type"].removeprefix("response.") for event in events)
    part = r"output_item.added content_part.added ({0}.delta )+{0}.done content_part.done "
    call = r"(output_item.added ({0}.delta )+{0}.done output_item.done )"
    assert re.fullmatch(
        "created in_progress "
        + (part.format("reasoning_text") + "output_item.done ")
        + (part.format("output_text") + "output_item.done ")
        + (call.format("function_call_arguments") + "{2}")
        + "completed",
        names,
    ), names
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"] + ["function_call"] * 2
    for index, item in enumerate(output):
        own = [event for event in events if event.get("output_index") == index]
        assert own[-1]["item"] == item
        text = "".join(event.get("delta", "") for event in own)
        assert text == (item.get("arguments") or item["content"][0]["text"])
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]


def test_events_of_messages_are_the_published_ones_in_their_order(server: ScriptedServer) -> None:
    from anthropic.types import RawMessageStreamEvent

    body = {"max_tokens": 99, "messages": [{"role": "user", "content": BOTH}], "tools": [TOOL]}
    url = f"{server.url}/v1/messages"
    events = events_of(httpx.post(url, json={**body, "stream": True}, timeout=SECONDS))
    models = models_of(get_args(get_args(RawMessageStreamEvent)[0]))
    for event in events:
        if event["type"] != "ping":
            models[event["type"]].model_validate(event)
    names = " ".join(event["type"] for event in events)
    block = "(content_block_start (content_block_delta )+content_block_stop )"
    assert re.fullmatch(f"message_start ping {block}{{4}}message_delta message_stop", names)
    indexes = [event["index"] for event in events if "index" in event]
    assert indexes == sorted(indexes)
    last = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta"]
    assert last[last.index("text_delta") - 1] == "signature_delta"
    whole = httpx.post(url, json=body, timeout=SECONDS).json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", *["tool_use"] * 2]
    assert events[-2]["usage"] == whole["usage"]
    assert events[-2]["delta"]["stop_reason"] == whole["stop_reason"] == "tool_use"
    counted = httpx.post(f"{url}/count_tokens", json={k: body[k] for k in ("messages", "tools")})
    usage = whole["usage"]
    assert usage["cache_read_input_tokens"] == 3
    assert counted.json()["input_tokens"] == usage["input_tokens"] + 3


def test_a_stream_that_breaks_ends_in_the_doors_own_event() -> None:
    for path, kind in (("responses", "response.failed"), ("messages", "error")):
        with ScriptedServer(config_of(TOKENIZER, TEMPLATE), script) as server:

            def breaks(
                prompt: str, params: SamplingParams, server: ScriptedServer = server
            ) -> Iterator[str]:
                yield "one"
                server.engine.die("the device is gone")
                yield "two"

            server.engine.script = breaks  # type: ignore[assignment]
            body: dict[str, Any] = {"stream": True, "max_tokens": 9}
            body["messages"] = [{"role": "user", "content": "x"}]
            if path == "responses":
                body = {"stream": True, "input": "x"}
            response = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=SECONDS)
            last = events_of(response)[-1]
            assert last["type"] == kind
            error = last["response"]["error"] if path == "responses" else last["error"]
            assert "the device is gone" in error["message"]


# Thoughts


def test_thoughts_go_out_sealed_and_come_back(server: ScriptedServer, responses: Any) -> None:
    made = responses.create(input=ASK, include=["reasoning.encrypted_content"], store=False)
    thought = made.output[0]
    assert thought.content[0].text == "hm"
    item = {"type": "reasoning", "summary": [], "encrypted_content": thought.encrypted_content}
    chat, _ = responses_asked(parsed(ResponsesBody, {"input": [item]}))
    assert chat.messages[0].reasoning_content == "hm"
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": ASK}]}
    body["thinking"] = {"type": "adaptive", "display": "omitted"}
    made = httpx.post(f"{server.url}/v1/messages", json=body, timeout=SECONDS).json()
    (block, *_) = made["content"]
    assert block["thinking"] == ""
    turn = {"role": "assistant", "content": [block]}
    again = {"max_tokens": 9, "messages": [turn, {"role": "user", "content": "x"}]}
    chat, _ = messages_asked(parsed(MessagesBody, again))
    assert chat.messages[0].reasoning_content == "hm"
    assert unsealed("regatta1.é") is unsealed("other") is None


def test_a_thought_whose_beginning_is_not_marked_is_a_block_of_a_whole_answer(
    server: ScriptedServer,
) -> None:
    server.engine.script = lambda prompt, params: ["hm", "</thi", "nk>\n\nYes"]
    url = f"{server.url}/v1/responses"
    made = httpx.post(url, json={"input": "x"}, timeout=SECONDS).json()
    events = events_of(httpx.post(url, json={"input": "x", "stream": True}, timeout=SECONDS))
    server.engine.script = script
    assert [item["content"][0]["text"] for item in made["output"]] == ["hm", "Yes"]
    (item,) = events[-1]["response"]["output"]  # as in a stream of chat
    assert item["content"][0]["text"] == "hm</think>\n\nYes"


# Keys, versions, errors, metrics


def test_keys_versions_and_errors_are_those_of_the_door() -> None:
    config = config_of(TOKENIZER, TEMPLATE, api_keys=("k",))
    with ScriptedServer(config, script) as server, httpx.Client(base_url=server.url) as client:
        body = {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
        path = "/v1/messages"

        def kind(response: httpx.Response) -> tuple[int, str]:
            made = response.json()
            assert made["type"] == "error"
            assert made["request_id"] == response.headers["request-id"]
            return response.status_code, made["error"]["type"]

        assert kind(client.post(path, json=body)) == (401, "authentication_error")
        headers = {"X-Api-Key": "no"}
        assert kind(client.post(path, json=body, headers=headers)) == (401, "authentication_error")
        client.headers["X-Api-Key"] = "k"
        for version, status in (("2023-06-01", 200), ("2026-10-21", 200), ("2020-01-01", 400)):
            response = client.post(path, json=body, headers={"anthropic-version": version})
            assert response.status_code == status
        assert kind(response) == (400, "invalid_request_error")
        assert kind(client.get(path)) == (405, "invalid_request_error")
        named = client.post(path, json={**body, "model": "other"})
        assert kind(named) == (404, "not_found_error")
        large = client.post(path, json={**body, "system": "x" * (9 << 20)})
        assert kind(large) == (413, "request_too_large")
        server.call(lambda: server.engine.die("gone"))
        assert kind(client.post(f"{path}/count_tokens", json=body)) == (503, "overloaded_error")
        other = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong")
        with other, pytest.raises(openai.AuthenticationError):
            other.responses.create(input="x")


def test_metrics_count_requests_by_the_patterns_of_routes(server: ScriptedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        for path in ("", "/input_items", "/cancel", "/other"):
            call = client.post if path == "/cancel" else client.get
            assert call(f"/v1/responses/resp_x{path}").status_code == 404
        text = client.get("/metrics").text
    for pattern in ("", "/input_items", "/cancel"):
        route = f'route="/v1/responses/{{response_id}}{pattern}"'
        assert f'regatta_http_requests_total{{{route},status="404"}}' in text
    assert "resp_x" not in text
