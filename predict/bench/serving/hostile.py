"""What hostile requests do to another client's stream: `python -m predict.bench.serving.hostile`.

One client streams an answer; beside it another sends one hostile body after another, each as soon
as the one before is answered and a pause is over. Streams with and without take turns. The answer
to a hostile body is measured too: it must be a 4xx, or what an honest one would get.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from predict.cli.command import run_command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.errors import EXIT_FAILURE, UserError
from predict.system.console import say, show
from predict.system.signals import Signals

if TYPE_CHECKING:
    import aiohttp

PROG = "python -m predict.bench.serving.hostile"
_GROUP = "Hostile requests"
FLAGS = (
    Flag(_GROUP, "base_url", "str", "http://127.0.0.1:8000/v1",
         "Where the routes of OpenAI's API are, with /v1."),
    Flag(_GROUP, "api_key", "str", None,
         "Key of the server; when not given, $REGATTA_API_KEY."),
    Flag(_GROUP, "output_len", "int", 512,
         "Tokens of the stream that is watched."),
    Flag(_GROUP, "repetitions", "int", 5,
         "Streams with, and without, each kind of body."),
    Flag(_GROUP, "pause", "float", 0.25,
         "Seconds between an answer and the next hostile body."),
    Flag(_GROUP, "kinds", "strs", None,
         "Which bodies are sent; when not given, all."),
)  # fmt: skip
DESCRIPTION = "Measures how much hostile requests slow another client's stream."


def _fields(text: str) -> bytes:
    return b'{"prompt": "a", "max_tokens": 1, ' + text.encode() + b"}"


# Each is among the most that its limit lets in, or a little more.
BODIES: dict[str, bytes] = {
    "10-MB-of-text": b'{"prompt": "' + b"a" * (10 << 20) + b'"}',
    "7-MB-of-text": b'{"prompt": "' + b"word " * (7 << 18) + b'"}',
    "a-long-word": b'{"prompt": "' + b"a" * 100_000 + b'"}',
    "spaces": b'{"prompt": "' + b" " * 100_000 + b'"}',
    "emoji": b'{"prompt": "' + "\U0001f600".encode() * 25_000 + b'"}',
    "escapes": b'{"prompt": "' + b"\\u00e9" * 1_000_000 + b'"}',
    "lists": b'{"prompt": [' + b"[]," * 2_000_000 + b"[]]}",
    "token-ids": b'{"prompt": [' + b"5," * 60_000 + b"5]}",
    "keys": b"{" + b",".join(b'"k%d":0' % i for i in range(60_000)) + b"}",
    "deep": b'{"prompt": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}",
    "commas-in-a-text": b'{"prompt": "' + b"," * 4_000_000 + b'"}',
    "a-long-number": b'{"prompt": "a", "seed": ' + b"9" * 1_000_000 + b"}",
    "many-answers": _fields('"n": 100000'),
    "many-biases": _fields('"logit_bias": {' + ",".join(f'"{i}": 1' for i in range(16_000)) + "}"),
    "a-regex": _fields('"guided_regex": "((a{1,1000}){1,1000}){1,1000}"'),
    "alternatives": _fields(
        '"guided_json": {"anyOf": ['
        + ",".join(f'{{"properties": {{"a{i}": {{"type": "string"}}}}}}' for i in range(500))
        + "]}"
    ),
    "a-schema-in-itself": _fields('"guided_json": {"$ref": "#"}'),
    "no-field": b'{"prompt": "a", "' + b"x" * 1_000_000 + b'": 1}',
}


@dataclass
class Seen:
    """What was measured with one kind of body."""

    alone: list[float]  # tokens/s of streams without it
    beside: list[float]  # and with it
    statuses: set[int]
    num_sent: int = 0

    @property
    def slowdown(self) -> float:
        """By how much the stream is slower, as a share of its speed."""
        return 1 - statistics.median(self.beside) / statistics.median(self.alone)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and prints a table; 1 where the server failed on a body."""

    def action(signals: Signals) -> int:
        words = sys.argv[1:] if argv is None else argv
        flags = parse_flags(words, FLAGS, PROG, DESCRIPTION, "[--flag [VALUE] ...]")
        for kind in flags["kinds"] or ():
            if kind not in BODIES:
                raise UserError(f"--kinds {kind} is not known (allowed: {', '.join(BODIES)})")
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise UserError('aiohttp is not installed: pip install -e ".[bench]"') from None
        found = asyncio.run(measure(flags))
        show(f"{'body':<20}{'sent':>6}{'status':>10}{'alone':>10}{'beside':>10}{'slower by':>11}")
        for kind, seen in found.items():
            statuses = " ".join(map(str, sorted(seen.statuses)))
            alone, beside = statistics.median(seen.alone), statistics.median(seen.beside)
            show(
                f"{kind:<20}{seen.num_sent:>6}{statuses:>10}{alone:>10.1f}{beside:>10.1f}"
                f"{seen.slowdown:>11.1%}"
            )
        failed = [kind for kind, seen in found.items() if max(seen.statuses, default=0) >= 500]
        for kind in failed:
            say(f"the server failed on: {kind}")
        return EXIT_FAILURE if failed else 0

    return run_command(action)


async def measure(flags: FlagValues) -> dict[str, Seen]:
    """What each kind of body does. Raises UserError where the server does not answer."""
    import aiohttp

    key = flags["api_key"] or os.environ.get("REGATTA_API_KEY")
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    url = f"{flags['base_url'].rstrip('/')}/completions"
    found: dict[str, Seen] = {}
    async with aiohttp.ClientSession(headers=headers) as session:
        await speed(session, url, flags["output_len"])
        for kind in flags["kinds"] or BODIES:
            seen = found[kind] = Seen([], [], set())
            for _ in range(flags["repetitions"]):
                seen.alone.append(await speed(session, url, flags["output_len"]))
                attack = asyncio.create_task(send(session, url, BODIES[kind], flags["pause"], seen))
                try:
                    seen.beside.append(await speed(session, url, flags["output_len"]))
                finally:
                    attack.cancel()
            say(f"{kind}: slower by {seen.slowdown:.1%}")
    return found


async def speed(session: aiohttp.ClientSession, url: str, num_tokens: int) -> float:
    """Tokens/s of one stream, from its first piece to its end."""
    body = {
        "prompt": "def gcd(a, b):",
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise UserError(f"{url} answers {response.status}: {(await response.text())[:200]}")
        await response.content.readany()
        started = time.perf_counter()
        async for _ in response.content.iter_any():
            pass
    return num_tokens / (time.perf_counter() - started)


async def send(
    session: aiohttp.ClientSession, url: str, body: bytes, pause: float, seen: Seen
) -> None:
    """Sends a body over and over, until it is cancelled."""
    import aiohttp

    while True:
        try:
            async with session.post(url, data=body) as response:
                await response.read()
                seen.statuses.add(response.status)
        except aiohttp.ClientError:  # refused before all of it was sent
            seen.statuses.add(413)
        seen.num_sent += 1
        await asyncio.sleep(pause)


if __name__ == "__main__":
    sys.exit(main())
