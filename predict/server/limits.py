"""Limits on bodies, on answers that run or wait, and on the time that a body takes."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import anyio
from starlette.requests import Request

from predict.errors import UserError
from predict.server.config import ServerConfig
from predict.server.errors import ApiError, invalid
from predict.server.key_file import Key
from predict.system.files import parse_json

INLINE_BYTES = 16 << 10  # of a body that is parsed at once; a larger one goes to a thread
MAX_DEPTH = 48  # lists and objects of a body within each other; a schema may have some forty
BASE_VALUES = 1 << 16  # JSON values of a body, besides the tokens of its prompts
VALUES_PER_TOKEN = 8  # of the model's max_length
MAX_IDS = 1 << 20  # token ids of all prompts of a body, beyond those
MAX_BUFFERED_BODIES = 16  # of the largest size, of all clients together
_CONTAINERS = (b"[", b"{")  # which take more memory than ids
_STRUCTURE = (b",", *_CONTAINERS)


class Admission:
    """Counts answers that run or wait, and bytes of bodies that are held. One event loop's."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._max_body_bytes = MAX_BUFFERED_BODIES * config.max_body_bytes
        self.num_answers = 0
        self._of_key: Counter[bytes] = Counter()  # the same, by the digest of each key
        self.num_body_bytes = 0

    def count_with(self, other: Admission) -> None:
        """Counts the answers of each key together with those of another model."""
        self._of_key = other._of_key

    @contextlib.contextmanager
    def body(self) -> Iterator[Held]:
        """Counts a request's body until the end of the block."""
        held = Held(self)
        try:
            yield held
        finally:
            held.release()

    def check_room(self, key: Key) -> None:
        """Raises ApiError 429 where there is no room for a single answer."""
        self._check_key(key, 1)
        if self.num_answers >= self._config.max_in_flight:
            raise self._full()

    def enter(self, num_answers: int, key: Key) -> None:
        """Counts the answers of a request; raises ApiError 429 where there is no room for them."""
        self._check_key(key, num_answers)
        most = self._config.max_in_flight
        if num_answers > most:
            raise invalid(
                "n",
                f"the request asks for {num_answers} answers (allowed: {most}, all prompts "
                "together); send several requests",
            )
        if self.num_answers + num_answers > most:
            raise self._full()
        self.num_answers += num_answers
        self._of_key[key.digest] += num_answers

    def leave(self, num_answers: int, key: Key) -> None:
        """Stops counting so many answers."""
        self.num_answers -= num_answers
        self._of_key[key.digest] -= num_answers
        if not self._of_key[key.digest]:
            del self._of_key[key.digest]  # a file of keys may change for ever

    def _check_key(self, key: Key, num_answers: int) -> None:
        """Raises ApiError 429 where those who have a key would have too many answers."""
        most, has = key.max_queue, self._of_key[key.digest]
        if most is not None and has + num_answers > most:
            raise self._busy(
                f"{has} answers of this API key run or wait already, and the request asks for "
                f"{num_answers} (allowed: {most})"
            )

    def take_bytes(self, count: int) -> None:
        """Counts bytes of a body; raises ApiError 429 where all bodies have too many."""
        if count > 0 and self.num_body_bytes + count > self._max_body_bytes:
            raise self._busy("the server holds as many bytes of requests as it may")
        self.num_body_bytes += count

    def _full(self) -> ApiError:
        most = self._config.max_in_flight
        return self._busy(f"{self.num_answers} of {most} answers run or wait already")

    def _busy(self, what: str) -> ApiError:
        seconds = max(1, round(self._config.retry_after))
        return ApiError(
            429, f"{what}; try again in {seconds} s", headers={"Retry-After": str(seconds)}
        )


class Held:
    """The counted bytes of one body."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self.size = 0

    def take(self, count: int) -> None:
        """Counts more bytes; raises as `Admission.take_bytes`."""
        self._admission.take_bytes(count)
        self.size += count

    def release(self) -> None:
        """Stops counting them."""
        self._admission.take_bytes(-self.size)
        self.size = 0


async def read_body(request: Request, config: ServerConfig, held: Held) -> bytes:
    """The body of a request, of JSON's type, within its size and its time.

    Raises ApiError, and ClientDisconnect where the client goes.
    """
    _check_type(request)
    most = config.max_body_bytes
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and (len(announced) > 18 or int(announced) > most):
        raise _too_large(f"{announced[:20]} bytes", most)
    chunks: list[bytes] = []
    with late_bodies_refused(config):
        async for chunk in request.stream():
            held.take(len(chunk))
            if held.size > most:
                raise _too_large("more", most)
            chunks.append(chunk)
    return b"".join(chunks)


@contextlib.contextmanager
def late_bodies_refused(config: ServerConfig) -> Iterator[None]:
    """The time that a body has. Raises ApiError 408 where the block takes longer."""
    try:
        with anyio.fail_after(config.body_timeout):
            yield
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not come within {config.body_timeout:g} s; send it faster",
            headers={"Connection": "close"},
        ) from None


async def read_json(request: Request, config: ServerConfig, held: Held) -> dict[str, Any]:
    """The JSON object that a request's body is. Raises as read_body does."""
    data = await read_body(request, config, held)
    length = config.engine.max_length
    if len(data) <= INLINE_BYTES:
        value = _parsed(data, length, config.max_prompts)
    else:
        loop = asyncio.get_running_loop()
        value = await loop.run_in_executor(None, _parsed, data, length, config.max_prompts)
    if not isinstance(value, dict):
        raise invalid(None, "the body is no JSON object; write {...} with the request's fields")
    return value


def _parsed(data: bytes, max_length: int, max_prompts: int) -> Any:
    most = BASE_VALUES + VALUES_PER_TOKEN * max_length
    _check_values(data, _CONTAINERS, most)
    _check_values(data, _STRUCTURE, most + min(max_prompts * max_length, MAX_IDS))
    try:
        return parse_json(data, "the body", max_depth=MAX_DEPTH)
    except UserError as error:
        raise invalid(None, str(error), "invalid_json") from None


def _check_values(data: bytes, marks: Sequence[bytes], most: int) -> None:
    """Raises ApiError where a body has more values than any request needs, by their marks.

    Counting takes a hundredth of the time that it takes to build them.
    """
    count = sum(map(data.count, marks))
    if count <= most:
        return
    # A long text may have many commas: what stands in texts is not counted then.
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_texts = bare.count(b'"') // 2
    if num_texts <= most:
        outside = b"".join(bare.split(b'"')[::2])
        count = sum(map(outside.count, marks))
    if count > most:
        raise ApiError(
            413,
            f"the body has some {count} JSON values (allowed: {most}); send fewer or shorter "
            "prompts in a request, or prompts as text",
        )


def _check_type(request: Request) -> None:
    # A page of another origin may send text/plain to a server on this machine, but not JSON.
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(
            415,
            f"the Content-Type is {kind[:80]!r} (allowed: application/json); send the header "
            "Content-Type: application/json",
            headers={"Connection": "close"},
        )


def _too_large(got: str, most: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {got} (allowed: {most} bytes); send less in a request, or raise "
        "--max_body_bytes",
        headers={"Connection": "close"},
    )
