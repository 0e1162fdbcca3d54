"""OpenAI's own Python client, unchanged: with the demo model, and with scripted calls of tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from predict import LLM, SamplingParams
from predict.config.engine import EngineConfig
from predict.server.config import ServerConfig
from tests.server.conftest import TEMPLATE
from tests.support.http_server import SECONDS, ModelServer, ScriptedServer, config_of
from tests.support.paths import DEMO, ROOT
from tests.support.tiny import TOKENIZER

KEY = "a-key"
PROMPT = "def gcd(a, b):"
GREEDY: dict[str, Any] = {"model": "demo_model", "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    return EngineConfig(
        model_name_or_path=str(DEMO),
        dtype="float32",
        chat_template=str(ROOT / "examples" / "demo_template.jinja"),
        attention="append",
        batch_size=32,
    )


@pytest.fixture(scope="module")
def server(engine_config: EngineConfig) -> Iterator[ModelServer]:
    with ModelServer(ServerConfig(engine=engine_config, api_keys=(KEY,))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def expected(engine_config: EngineConfig) -> str:
    """What the model says without a server."""
    llm = LLM(engine_config)
    return llm.generate([PROMPT], SamplingParams(temperature=0, max_new_tokens=24))[0].text


def test_completions_are_those_of_the_python_api(client: openai.OpenAI, expected: str) -> None:
    assert client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text == expected
    stream = client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": PROMPT}]
    whole = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, **GREEDY
    )
    assert whole.usage is not None
    stream = client.chat.completions.create(
        messages=messages,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        **GREEDY,
    )
    text, usage, reason = "", None, None
    entries: list[Any] = []
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            entries += choice.logprobs.content or [] if choice.logprobs else []
            reason = choice.finish_reason or reason
    (choice,) = whole.choices
    assert choice.logprobs is not None
    assert (text, reason) == (choice.message.content, choice.finish_reason)
    assert entries == choice.logprobs.content
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == len(entries)


def test_samples_are_reproducible_by_seed(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        made = client.completions.create(
            model="demo_model", prompt=PROMPT, n=3, seed=7, max_tokens=12, stop=["\n\n"]
        )
        return [choice.text for choice in made.choices]

    first = texts()
    assert texts() == first
    assert len(set(first)) > 1


def test_64_requests_in_flight_are_all_answered(server: ModelServer, expected: str) -> None:
    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, timeout=SECONDS, max_retries=0
        ) as client:

            async def ask(streamed: bool) -> str:
                if not streamed:
                    whole = await client.completions.create(prompt=PROMPT, **GREEDY)
                    return whole.choices[0].text
                stream = await client.completions.create(prompt=PROMPT, stream=True, **GREEDY)
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(ask(bool(i % 2)) for i in range(64)))

    assert asyncio.run(ask_all()) == [expected] * 64


def test_errors_are_the_clients_own(client: openai.OpenAI, server: ModelServer) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="demo_model", prompt="a", max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-4", prompt="a")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="no").models.list()
    assert [model.id for model in client.models.list()] == ["demo_model"]


class Answer(BaseModel):
    name: Literal["gcd", "lcm"]
    count: int
    tags: list[Literal["a", "b"]]


def test_a_schema_comes_back_parsed(client: openai.OpenAI) -> None:
    made = client.chat.completions.parse(
        model="demo_model",
        messages=[{"role": "user", "content": PROMPT}],
        response_format=Answer,
        max_tokens=200,
        temperature=0,
        logit_bias={},
    )
    (choice,) = made.choices
    if choice.finish_reason == "stop":
        assert isinstance(choice.message.parsed, Answer)
    else:
        # A model that was trained on code may go on with digits to its last token.
        assert choice.message.content is not None
        assert choice.message.content.startswith('{"name": "')


def test_a_schema_that_cannot_be_had_is_a_400_that_names_it(client: openai.OpenAI) -> None:
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/missing"}},
    }
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(
                model="demo_model",
                messages=[{"role": "user", "content": "x"}],
                response_format=form,
                stream=stream,
            )
        assert bad.value.param == "response_format.json_schema.schema"


HOSTILE: dict[str, tuple[str, Any]] = {
    "a schema that holds itself": (
        "guided_json",
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}}}}},
    ),
    "a schema that is itself": ("guided_json", {"$ref": "#"}),
    "a circle of references": (
        "guided_json",
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ),
    "a reference to elsewhere": ("guided_json", {"$ref": "http://169.254.169.254/schema"}),
    "a file": ("guided_json", {"$ref": "file:///etc/passwd"}),
    "nothing fits": ("guided_json", False),
    "many alternatives": (
        "guided_json",
        {"anyOf": [{"properties": {f"a{i}": {"type": "string"}}} for i in range(800)]},
    ),
    "a pattern of a schema": (
        "guided_json",
        {"type": "object", "patternProperties": {"(a+)+$": {"pattern": "^(([a-z])+.)+$"}}},
    ),
    "catastrophic": ("guided_regex", "(a+)+$"),
    "catastrophic alternatives": ("guided_regex", "(a|a)*b"),
    "counted without end": ("guided_regex", "((a{1,1000}){1,1000}){1,1000}"),
    "look-behind": ("guided_regex", "(?<=a)b"),
    "a back reference": ("guided_regex", r"(a)\1"),
    "an open bracket": ("guided_regex", "[a"),
    "a grammar that is itself": ("guided_grammar", "start: start\n"),
    "a grammar without a start": ("guided_grammar", 'a: "b"\n'),
    "an import": ("guided_grammar", "%import common.WORD\nstart: WORD\n"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_had_or_refused_by_name(client: openai.OpenAI, name: str) -> None:
    param, value = HOSTILE[name]
    refusal: openai.BadRequestError | None = None
    try:
        client.completions.create(
            model="demo_model", prompt="a", max_tokens=2, extra_body={param: value}
        )
    except openai.BadRequestError as error:
        refusal = error
    assert refusal is None or refusal.param == param
    assert client.completions.create(model="demo_model", prompt="a", max_tokens=1).choices


# Tools: a scripted model that calls, hears, and answers.

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "%s"}}\n</tool_call>'


def script(prompt: str, params: SamplingParams) -> list[str]:
    """Calls for each place that it was not told of yet, thinks first, and sums up."""
    if "[tools]" not in prompt:
        return ["no tools", " here"]
    places = [place for place in ("Rome", "Oslo") if f"{place}: " not in prompt]
    if places:
        text = f"<think>{places[0]} is missing</think>" + CALL % places[0]
    else:
        text = "Warm in Rome, cold in Oslo."
    return [text[i : i + 7] for i in range(0, len(text), 7)]


@pytest.fixture(scope="module")
def caller() -> Iterator[ScriptedServer]:
    with ScriptedServer(config_of(TOKENIZER, TEMPLATE, 4096), script) as server:
        yield server


@pytest.fixture(scope="module")
def tools_client(caller: ScriptedServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none", timeout=SECONDS) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
def test_tools_over_three_turns(tools_client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "How warm is it in Rome and Oslo?"}]
    called: list[str] = []
    for _ in range(3):
        message = _message(tools_client, messages, stream)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            assert message["reasoning_content"].endswith("is missing")
            place = json.loads(call["function"]["arguments"])["place"]
            called.append(place)
            content = f"{place}: {20 if place == 'Rome' else 2} degrees"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
    assert called == ["Rome", "Oslo"]
    assert messages[-1]["content"] == "Warm in Rome, cold in Oslo."


def _message(client: openai.OpenAI, messages: list[Any], stream: bool) -> dict[str, Any]:
    """The next turn, as a client keeps it."""
    asked: dict[str, Any] = {"model": "test", "messages": messages, "tools": [WEATHER]}
    if not stream:
        choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == ("tool_calls" if choice.message.tool_calls else "stop")
        return choice.message.model_dump()
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    reason = None
    for chunk in client.chat.completions.create(**asked, stream=True):
        (choice,) = chunk.choices
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for delta in choice.delta.tool_calls or ():
            if delta.index == len(calls):
                function = {"name": delta.function.name, "arguments": ""}
                calls.append({"id": delta.id, "type": "function", "function": function})
            calls[delta.index]["function"]["arguments"] += delta.function.arguments or ""
        reason = choice.finish_reason or reason
    assert reason == ("tool_calls" if calls else "stop")
    return {**message, "tool_calls": calls} if calls else message


def test_a_tool_that_must_be_called_is_guided(
    tools_client: openai.OpenAI, caller: ScriptedServer
) -> None:
    ask: Any = {"model": "test", "messages": [{"role": "user", "content": "x"}], "tools": [WEATHER]}
    named = {"type": "function", "function": {"name": "weather"}}
    choices: list[Any] = ["required", named, "auto"]
    for choice in choices:
        tools_client.chat.completions.create(**ask, tool_choice=choice)
        guide = caller.engine.added[-1][1].guide
        assert guide is not None
        assert "weather" in guide.text
    made = tools_client.chat.completions.create(**ask, tool_choice="none")
    assert made.choices[0].message.content == "no tools here"
    assert caller.engine.added[-1][1].guide is None
    with pytest.raises(openai.BadRequestError) as bad:
        tools_client.chat.completions.create(
            **ask, tool_choice={"type": "function", "function": {"name": "wether"}}
        )
    assert bad.value.param == "tool_choice"
    assert "weather" in bad.value.message


def test_a_model_without_tools_says_so(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(
            model="demo_model", messages=[{"role": "user", "content": "x"}], tools=[WEATHER]
        )
    assert bad.value.param == "tools"
