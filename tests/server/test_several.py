"""Several models in one server: in turns under load, and never more of them than the limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp
import httpx
import pytest

from predict.errors import UserError
from predict.server.context import REFUSED
from predict.server.engine_client import EngineProcess
from predict.server.engine_process import needed_bytes
from predict.server.errors import ApiError
from predict.server.flags import parse
from predict.server.from_flags import several_configs
from predict.server.key_file import Key
from predict.server.lifecycle import Lifecycle
from predict.server.limits import Admission
from predict.server.rota import Member, Rota
from predict.server.run import Front, Served, listen
from predict.server.several import Several, _ByModel, started
from tests.server.conftest import TEMPLATE
from tests.server.engines import SECONDS, write_model
from tests.support import tiny
from tests.support.http_server import ScriptedServer, config_of

NAMES = ("a", "b", "c")
BASE = ("--device", "cpu", "--dtype", "float32", "--max_length", "64", "--block_size", "16")
WORDS = (*BASE, "--batch_size", "4", "--append_attn", "--access_log", "false")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("several")
    shape = {"vocab_size": 342, "eos_token_id": 1}
    for seed, name in enumerate(NAMES):
        write_model(root / name)
        tiny.write(root / name, shape, seed=seed)
    return [f"{name}={root / name}" for name in NAMES]


def ask(prompt: list[int], model: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0}
    return {**body, "ignore_eos": True}


@contextlib.contextmanager
def serving(folders: list[str], *words: str) -> Iterator[tuple[Several, Front, str]]:
    configs = several_configs(parse(["--model_folders", *folders, *WORDS, *words]))
    assert configs is not None
    processes: list[EngineProcess] = []
    listening, lifecycle = listen("127.0.0.1", 0), Lifecycle()
    try:
        started(configs, processes.append)
        engines = Several(configs, processes, lifecycle, None)
        served = Served(engines, engines.app, engines.say_ready)
        config = next(iter(configs.values()))
        front = Front(config, processes, served, [listening], lifecycle, None)
        yield engines, front, front._url
    finally:
        for process in processes:
            process.kill()
        listening.close()


def test_three_models_take_turns_under_load_within_the_limit(folders: list[str]) -> None:
    with serving(folders, "--max_models_bytes", str(5 << 19)) as (engines, front, url):

        async def main() -> None:
            serve = asyncio.create_task(front.serve())
            async with aiohttp.ClientSession(url) as session:
                while (await session.get("/ready")).status != 200:
                    await asyncio.sleep(0.05)
                cards = await (await session.get("/v1/models")).json()
                assert [card["id"] for card in cards["data"]] == list(NAMES)
                need = engines.rota.members[0].num_bytes
                assert need < (5 << 19) < 3 * need, "two of the three fit"

                async def text(model: str, number: int) -> str:
                    body = ask([5, 6, 7 + number % 5], model)
                    async with session.post("/v1/completions", json=body) as response:
                        found = await response.json()
                    assert response.status == 200, found
                    assert found["model"] == model
                    said: str = found["choices"][0]["text"]
                    return said

                alone = {(m, n): await text(m, n) for m in NAMES for n in range(5)}
                assert len({alone[model, 0] for model in NAMES}) == 3
                asked = [(model, n) for n in range(20) for model in NAMES]
                found = await asyncio.gather(*(text(*each) for each in asked))
                assert found == [alone[model, n % 5] for model, n in asked]
                assert 2 * need == engines.rota.most_bytes <= 5 << 19
                unknown = await session.post("/v1/completions", json=ask([5], "d"))
                assert unknown.status == 404
                assert "a, b, c" in await unknown.text()
                metrics = await (await session.get("/metrics")).text()
                assert 'regatta_num_requests_running{model_name="b"} 0.0' in metrics
            serve.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serve
            await engines.stop()

        asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_a_model_that_never_fits_is_refused_with_numbers() -> None:
    rota = Rota(1 << 20, lambda _: None)
    rota.members.append(Member("a", Engine([], "a"), 1, num_bytes=2 << 20))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a takes 2 MiB.* allows 1 MiB"):
        rota.check()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"], "name=path"),
        (["a=x", "a=y"], "each name once"),
        (["a=x", "--model_name_or_path", "y"], "leave out --model_name_or_path"),
    ],
)
def test_folders_that_are_wrong_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        several_configs(parse(["--model_folders", *words]))


def test_a_model_that_cannot_sleep_is_refused_before_it_is_loaded(folders: list[str]) -> None:
    folder = folders[0].partition("=")[2]
    drafts = ["--speculate_method", "draft_model", "--draft_model_name_or_path", folder]
    configs = several_configs(parse(["--model_folders", *folders[:1], *WORDS, *drafts]))
    assert configs is not None
    with pytest.raises(UserError, match=r"sleep.*--speculate_method draft_model"):
        needed_bytes(configs["a"].engine)


class Engine:
    """Wakes and sleeps at once."""

    def __init__(self, log: list[str], name: str) -> None:
        self.is_ready, self.is_sleeping, self._log, self._name = True, True, log, name

    async def rest(self, rest: Any) -> None:
        self.is_sleeping = rest.act == "sleep"
        self._log.append(f"{rest.act} {self._name}")
        await asyncio.sleep(0)


def test_nobody_starves_and_who_waits_too_long_is_told() -> None:
    log: list[str] = []

    async def main() -> None:
        rota = Rota(None, lambda _: None)
        a, b = (Member(name, Engine(log, name), 1) for name in "ab")  # type: ignore[arg-type]
        rota.members += [a, b]
        loop, ran = asyncio.get_running_loop(), list[str]()

        async def request(member: Member, seconds: float = 0.001, most: float = 10.0) -> None:
            async with rota.turn(member, loop.time() + most):
                assert [each.name for each in rota.members if each.is_awake] == [member.name]
                ran.append(member.name)
                await asyncio.sleep(seconds)

        # Requests for a never end; the one for b comes to its turn all the same.
        endless = [asyncio.create_task(request(a, 0.01)) for _ in range(3)]
        await asyncio.sleep(0.005)
        other = asyncio.create_task(request(b))
        for _ in range(20):
            endless.append(asyncio.create_task(request(a, 0.01)))
        await other
        assert ran.count("a") == 3, "those that came later wait behind it"
        await asyncio.gather(*endless)
        held = asyncio.create_task(request(a, 0.2))
        await asyncio.sleep(0.01)
        with pytest.raises(Exception, match="no turn in time"):
            await request(b, most=0.02)
        await held
        await request(b)
        assert json.dumps(log).count("wake_up b") == 2

    asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_a_turn_that_comes_as_the_wait_for_it_ends_is_given_back() -> None:
    async def main() -> None:
        rota = Rota(None, lambda _: None)
        a, b = (Member(name, Engine([], name), 1) for name in "ab")  # type: ignore[arg-type]
        rota.members += [a, b]
        loop = asyncio.get_running_loop()

        async def request(member: Member) -> None:
            async with rota.turn(member, loop.time() + SECONDS):
                pass

        late = asyncio.create_task(request(a))
        while not a.num_running:
            await asyncio.sleep(0)
        late.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await late
        assert a.num_running == 0
        await asyncio.wait_for(request(b), 5)

    asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_what_needs_no_model_takes_no_turn_and_a_background_answer_keeps_its_own() -> None:
    """Else a formula of the page wakes a model, and a stream waits for a turn behind itself."""
    count, most, running = 0, 1, 0

    @contextlib.asynccontextmanager
    async def take_turn(deadline: float) -> AsyncIterator[None]:
        nonlocal count, running
        count += 1
        if count > most:
            raise ApiError(504, "behind others, who wait for this one")
        running += 1
        yield
        running -= 1

    with ScriptedServer(config_of(tiny.TOKENIZER, TEMPLATE), lambda *_: ["a", "b"]) as server:
        server._server.config.app.state.context.take_turn = take_turn  # type: ignore[union-attr]
        with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
            server.engine.is_held = True
            made = client.post("/v1/responses", json={"input": "x", "background": True}).json()
            assert (count, running) == (1, 1), "the answer has the turn"
            path = f"/v1/responses/{made['id']}"
            assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
            server.wait_until(lambda: running == 0)
            assert client.post("/page/formula", json={"latex": "x"}).status_code == 200
            assert client.post("/nowhere", json={}).status_code == 404
            assert client.post("/sleep").status_code == 403
            server.engine.is_held = False
            most = 2
            body = {"input": "x", "background": True, "stream": True}
            assert "response.completed" in client.post("/v1/responses", json=body).text
            server.wait_until(lambda: (count, running) == (2, 0))


def test_bodies_are_looked_at_within_their_time_their_bytes_and_their_depth() -> None:
    config = config_of(tiny.TOKENIZER, body_timeout=0.05, max_body_bytes=1 << 20)
    seen: list[tuple[str, Any, int]] = []

    def app(name: str) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            refused = scope.get(REFUSED)
            size = 0
            while refused is None:
                message = await receive()
                size += len(message["body"])
                if not message["more_body"]:
                    break
            seen.append((name, refused and refused.status, size))

        return answer

    contexts: Any = [SimpleNamespace(models=SimpleNamespace(names=(name,))) for name in "ab"]
    several = _ByModel({name: app(name) for name in "ab"}, contexts, config)

    async def post(*parts: bytes, ends: bool = True) -> None:
        messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        messages[-1]["more_body"] = not ends

        async def receive() -> Any:
            if not messages:
                await asyncio.sleep(SECONDS)
            return messages.pop(0)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions"}
        await several(scope, receive, None)  # type: ignore[arg-type]

    async def main() -> None:
        await post(b'{"model": ', b'"b"}')
        await post(b'{"x":' + b"[" * 100_000)
        await post(b'{"model": ', ends=False)
        several._admission.take_bytes(15 << 20)
        await post(b"x" * (1 << 19), b"x" * (1 << 19))
        await post(b"x" * (1 << 19), b"x" * (1 << 19), b"x")
        assert several._admission.num_body_bytes == 15 << 20

    asyncio.run(asyncio.wait_for(main(), SECONDS))
    sizes = [("b", None, 14), ("a", None, 100_005), ("a", 408, 0), ("a", None, 1 << 20)]
    assert seen == [*sizes, ("a", 429, 0)]


def test_the_answers_of_a_key_count_for_all_models_together() -> None:
    first, second = (Admission(config_of(tiny.TOKENIZER)) for _ in range(2))
    second.count_with(first)
    key = Key(b"k", "k", max_queue=2)
    first.enter(2, key)
    with pytest.raises(ApiError, match="2 answers of this API key"):
        second.check_room(key)
    first.leave(2, key)
    second.check_room(key)
