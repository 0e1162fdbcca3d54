"""One streamed request to an OpenAI-compatible server, and the times at which its pieces came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from predict.bench.serving.report import RequestRecord
from predict.bench.serving.workload import Ask
from predict.errors import UserError, quoted
from predict.system.files import parse_json

MAX_LINE_BYTES = 1 << 24
DONE = b"[DONE]"


@dataclass(frozen=True)
class Server:
    """Where requests go, and what every one of them has."""

    base_url: str  # with /v1
    chat: bool  # /chat/completions; else /completions
    model: str
    body: Mapping[str, Any]  # more keys of every request
    api_key: str | None = None
    timeout_s: float = 600.0

    @property
    def url(self) -> str:
        return f"{self.base_url}/{'chat/completions' if self.chat else 'completions'}"

    def request(self, ask: Ask) -> dict[str, Any]:
        prompt: Any = ask.prompt
        if self.chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        return {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": ask.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
            **ask.sampling,
        }


def new_session(server: Server) -> aiohttp.ClientSession:
    """As many connections as there are requests; no proxy, no cookies."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=server.timeout_s),
        headers={"Authorization": f"Bearer {server.api_key}"} if server.api_key else {},
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=MAX_LINE_BYTES,
    )


class NoAnswerError(Exception):
    """A request without a whole answer; its text is the kind of failure."""


class _Stream:
    """The events of one answer so far."""

    def __init__(self) -> None:
        self.chunk_s: list[float] = []
        self.usage: Mapping[str, Any] = {}
        self.is_finished = False  # a reason was given, or [DONE]

    def take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.is_finished = True
            return
        try:
            event = parse_json(data, "an event")
        except UserError:
            raise NoAnswerError("an event that is no JSON") from None
        if not isinstance(event, dict) or event.get("error") is not None:
            raise NoAnswerError("an error in the stream")
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, dict):
                raise NoAnswerError("an event of another form")
            if has_content(choice):
                self.chunk_s.append(now)
            self.is_finished = self.is_finished or choice.get("finish_reason") is not None


def has_content(choice: Mapping[str, Any]) -> bool:
    """Whether a piece of an answer has text, reasoning or a call of a tool."""
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return bool(choice.get("text"))
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(name) for name in names)


async def send(
    session: aiohttp.ClientSession, server: Server, ask: Ask, due_s: float
) -> RequestRecord:
    """Sends a request and reads its answer to the end; a failure is in the record."""
    loop = asyncio.get_running_loop()
    sent_s = loop.time()
    stream = _Stream()
    error = None
    try:
        async for data in _events(session, server, server.request(ask)):
            stream.take(data, loop.time())
        if not stream.is_finished:
            error = "a stream that broke off"
    except NoAnswerError as failure:
        error = str(failure)
    except asyncio.TimeoutError:
        error = "no answer in time"
    except (aiohttp.ClientError, OSError) as failure:
        error = "a stream that broke off" if stream.chunk_s else type(failure).__name__
    except ValueError:
        error = "a line without an end"
    return RequestRecord(
        due_s=due_s,
        sent_s=sent_s,
        chunk_s=tuple(stream.chunk_s),
        end_s=loop.time(),
        num_input_tokens=_count(stream.usage, "prompt_tokens", 0),
        num_output_tokens=_count(stream.usage, "completion_tokens", len(stream.chunk_s)),
        error=error,
    )


async def _events(
    session: aiohttp.ClientSession, server: Server, body: Mapping[str, Any]
) -> AsyncIterator[bytes]:
    """The data of server-sent events: of OpenAI's API each is one line."""
    async with session.post(server.url, json=body, allow_redirects=False) as response:
        if response.status != 200:
            raise NoAnswerError(f"status {response.status}")
        async for line in response.content:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _count(usage: Mapping[str, Any], name: str, default: int) -> int:
    value = usage.get(name)
    return value if type(value) is int and value >= 0 else default


async def first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The name of the first model that the server has. Raises UserError."""
    answer = await _json_of(session, "GET", f"{base_url}/models", None)
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{base_url}/models names no model; give --model") from None


async def count_tokens(session: aiohttp.ClientSession, server: Server, text: str) -> int:
    """Tokens of a prompt with this text, as the server counts them. Raises UserError."""
    body = {**server.request(Ask(text, 1)), "stream": False}
    del body["stream_options"]
    usage = (await _json_of(session, "POST", server.url, body)).get("usage")
    count = _count(usage if isinstance(usage, dict) else {}, "prompt_tokens", 0)
    if not count:
        raise UserError(
            f"{server.url} does not say how many tokens a prompt has (usage.prompt_tokens); give "
            "--vocab_size, to send token ids"
        )
    return count


async def _json_of(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None
) -> dict[str, Any]:
    try:
        async with session.request(method, url, json=body, allow_redirects=False) as response:
            content = await response.read()
            status = response.status
    except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
        raise UserError(f"{url} cannot be asked: {error or type(error).__name__}", 1) from None
    if status != 200:
        said = quoted(content.decode("utf-8", "replace"), 300)
        raise UserError(f"{url} answers with status {status}: {said}", 1)
    value = parse_json(content, f"the answer of {url}")
    if not isinstance(value, dict):
        raise UserError(f"the answer of {url} is no JSON object")
    return value
