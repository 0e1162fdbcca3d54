"""Pictures of chats over HTTP: data URLs alone, counted as tokens, refused by field."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from predict import LLM, SamplingParams
from predict.server.front_model import FrontModel
from predict.sight import PictureReader
from predict.text.conversation import PicturePart
from tests.support.http_server import ModelServer, config_of
from tests.support.pictures import GOLDEN_IMAGES, SIZES, drawn, png_url

FOLDER = GOLDEN_IMAGES / "qwen2_5_vl"
PART: Any = {"type": "image_url", "image_url": {"url": png_url(drawn(0, SIZES[0]))}}
TEXT: Any = {"type": "text", "text": "what is it?"}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with ModelServer(config_of(FOLDER)) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0)


def ask(client: openai.OpenAI, *content: Any) -> Any:
    return client.chat.completions.create(
        model="test",
        messages=[{"role": "user", "content": list(content)}],
        temperature=0,
        max_tokens=8,
    )


def test_answers_are_those_of_the_model(client: openai.OpenAI) -> None:
    llm = LLM(str(FOLDER), max_length=256)
    for content in ((TEXT, PART), (PART, TEXT, PART), (TEXT,)):
        got = ask(client, *content)
        params = SamplingParams(temperature=0.0, max_new_tokens=8)
        wanted = llm.chat([{"role": "user", "content": list(content)}], params)[0]
        assert got.choices[0].message.content == wanted.text
        assert got.usage.prompt_tokens == len(wanted.prompt_token_ids)
        num_images = sum(part is PART for part in content)
        assert wanted.prompt_token_ids.count(261) == 45 * num_images


@pytest.mark.parametrize(
    "form",
    [{"max_dec_len": 8, "temperature": 0}, {"max_length": 8, "src_length": 5, "top_k": 1}],
    ids=["llm/server", "flask_server"],
)
def test_paddlenlps_forms_have_pictures(client: openai.OpenAI, form: dict[str, Any]) -> None:
    """Which src_length does not cut."""
    body = {"messages": [{"role": "user", "content": [TEXT, PART]}], **form}
    answer = httpx.post(f"{client.base_url}chat/completions", json=body, timeout=60).text
    text = ""
    for line in answer.split("\n"):
        if "{" in line:
            piece = json.loads(line.removeprefix("data: "))
            text += (
                piece["result"] if "result" in piece else piece["choices"][0]["delta"]["content"]
            )
    assert text == ask(client, TEXT, PART).choices[0].message.content


def url(value: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": value}}


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (url("https://example.com/a.png"), "none is fetched .*allowed_media_domains"),
        (url("/etc/passwd"), "allowed: data:image/png;base64"),
        (url("file:///etc/passwd"), "no file is read .*allowed_local_media_path"),
        (url("data:image/png;base64,AAAA"), "picture 1 of the prompt is no picture"),
        (url(PART["image_url"]["url"][:400]), "damaged or cut off|base64"),
        ({"type": "image_url"}, "image_url is missing"),
        ({"type": "image_url", "image_url": {"url": "x", "uri": "y"}}, "'uri'"),
        ({"type": "text", "text": "<|image_pad|>"}, "1 placeholders of pictures"),
        ({"type": "input_audio"}, "input_audio"),
        ({"type": []}, "type is"),
        ({**PART, "max_pixels": 9}, "a part image_url has the key 'max_pixels'"),
        ({"type": "image_url", "image_url": {**PART["image_url"], "max_pixels": 0}}, "max_pixels"),
    ],
)
def test_what_is_no_picture_is_refused_by_field(
    client: openai.OpenAI, part: Any, words: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=words) as error:
        ask(client, part)
    if part["type"] == "image_url":
        assert (error.value.param or "").startswith("messages[0].content[0]")
    assert ask(client, PART).usage.prompt_tokens > 45


def test_prompts_too_long_with_pictures_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"tokens of a prompt|max_length"):
        ask(client, *[PART, TEXT] * 6)


def test_texts_do_not_wait_for_pictures() -> None:
    """All threads of pictures are taken, and a text is encoded."""
    front, taken = FrontModel.load(config_of(FOLDER)), threading.Event()

    async def ask() -> list[int]:
        found = [("messages", PicturePart(Image.new("RGB", (9, 9))))] * 9
        seen = [asyncio.create_task(front.see([261], [each])) for each in found]
        await asyncio.sleep(0)
        ids = await asyncio.wait_for(front.encode("a", "prompt"), 20)
        taken.set()
        await asyncio.gather(*seen)
        return ids

    def waits(*_: Any) -> tuple[list[int], None]:
        assert taken.wait(30)
        return [261], None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PictureReader, "read", waits)
        assert asyncio.run(ask())
    front.close()


def test_what_is_fetched_is_decoded_ahead_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of addresses, which no body counts, do not gather."""
    monkeypatch.setattr("predict.server.front_model.FETCHES", 1)
    config, done = config_of(FOLDER), list[str]()
    engine = config.engine.changed(allowed_media_domains=("a.example",))
    front = FrontModel.load(replace(config, engine=engine))

    def fetched(_: PictureReader, parts: list[PicturePart]) -> list[PicturePart]:
        done.append("fetched")
        return parts

    def read(*_: Any) -> tuple[list[int], None]:
        time.sleep(0.05)
        done.append("read")
        return [261], None

    async def ask() -> None:
        found = [("messages", PicturePart("http://a.example/"))]
        await asyncio.gather(*(front.see([261], found) for _ in range(2)))

    monkeypatch.setattr(PictureReader, "fetched", fetched)
    monkeypatch.setattr(PictureReader, "read", read)
    asyncio.run(ask())
    front.close()
    assert done == ["fetched", "read"] * 2


def test_responses_and_messages_have_pictures(client: openai.OpenAI) -> None:
    """Theirs are the answers of chats: pictures of users, and of calls' results."""
    url = PART["image_url"]["url"]
    wanted = ask(client, TEXT, PART)
    said: Any = [
        {"type": "input_text", "text": TEXT["text"]},
        {"type": "input_image", "image_url": url, "detail": "auto"},
    ]
    got = client.responses.create(
        model="test",
        input=[{"role": "user", "content": said}],
        temperature=0,
        max_output_tokens=16,
    )
    assert got.output_text.startswith(wanted.choices[0].message.content)
    assert got.usage is not None
    assert got.usage.input_tokens == wanted.usage.prompt_tokens
    kind, _, data = url.partition(";base64,")
    source = {"type": "base64", "media_type": kind.removeprefix("data:"), "data": data}
    blocks: list[Any] = [TEXT, {"type": "image", "source": source}]
    answer = post_message(client, blocks)
    assert answer["content"][0]["text"] == wanted.choices[0].message.content
    assert answer["usage"]["input_tokens"] == wanted.usage.prompt_tokens
    for wrong, field in (
        ({**source, "data": None}, ".source.data"),
        ({**source, "url": url}, ".source.url"),
        ({**source, "media_type": "image/gif"}, ""),
        ({"type": "url", "url": "http://169.254.169.254/"}, ""),
    ):
        refused = post_message(client, [TEXT, {"type": "image", "source": wrong}])
        assert refused["error"]["message"].startswith(f"messages[0].content[1]{field}")


def post_message(client: openai.OpenAI, content: list[Any]) -> Any:
    """The answer of /v1/messages to a user's content."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 8, "temperature": 0}
    return httpx.post(f"{client.base_url}messages", json=body, timeout=60).json()


def test_a_placeholder_in_a_text_prompt_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="1 placeholders of pictures"):
        client.completions.create(model="test", prompt="a<|image_pad|>", max_tokens=2)
