"""A real model served: OpenAI's client gets what transformers says.

tests/golden_real/make_chat.py recorded that. Skipped where pip cannot download.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from predict.server.config import ServerConfig
from tests.support.http_server import SECONDS, ModelServer
from tests.support.real_models import CHAT, MODELS, config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]
WANTED = json.loads(CHAT.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def client(real_folder: Path) -> Iterator[openai.OpenAI]:
    settings = {"inference_model": True, "attention": "append"}
    path = real_folder / MODELS["smollm2"].file
    engine = config(path, max_length=512, batch_size=len(WANTED["stops"]), **settings)
    with ModelServer(ServerConfig(engine=engine, served_model_names=("smollm2",))) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=2 * SECONDS)


def asked(client: openai.OpenAI, messages: list[Any], **fields: Any) -> Any:
    greedy: Any = {"temperature": 0, "max_tokens": WANTED["num_tokens"], **fields}
    return client.chat.completions.create(model="smollm2", messages=messages, **greedy).choices[0]


def test_a_chat_of_three_turns(client: openai.OpenAI) -> None:
    messages: list[dict[str, str]] = []
    for question, answer in zip(WANTED["questions"], WANTED["answers"], strict=True):
        messages.append({"role": "user", "content": question})
        choice = asked(client, messages)
        assert (choice.message.content, choice.finish_reason) == (answer, "stop")
        messages.append({"role": "assistant", "content": answer})


def test_an_answer_of_a_schema(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": WANTED["form_question"]}]
    form = {"name": "person", "schema": WANTED["schema"]}
    given = {"type": "json_schema", "json_schema": form}
    choice = asked(client, messages, response_format=given)
    assert (choice.message.content, choice.finish_reason) == (WANTED["form_answer"], "stop")


def test_twenty_stops_at_once(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": WANTED["stop_question"]}]
    whole: str = WANTED["stop_answer"]
    stops: list[str] = WANTED["stops"]
    with ThreadPoolExecutor(20) as threads:
        choices = list(threads.map(lambda stop: asked(client, messages, stop=[stop]), stops))
    assert len(stops) == 20
    for stop, choice in zip(stops, choices, strict=True):
        text, found, _ = whole.partition(stop)
        assert choice.message.content == text, stop
        assert choice.finish_reason == ("stop" if found else "length"), stop
