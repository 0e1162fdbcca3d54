"""Tuned prefixes over HTTP: named as models, loaded and unloaded while requests run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from predict import LLM, SamplingParams
from predict.errors import UserError
from predict.server.config import ServerConfig
from predict.server.engine_client import AdapterFailed
from tests.golden.prefixes import random_prefix
from tests.server.engines import GREEDY, LONG, all_pieces, config, nothing_runs, running, texts
from tests.support.http_server import SECONDS, ModelServer, ScriptedServer, config_of
from tests.support.prefixes import TINY, write_prefix
from tests.support.tiny import TOKENIZER

LOAD, UNLOAD = "/v1/load_prefix", "/v1/unload_prefix"
PROMPT = [5, 9, 11, 30]
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of prefixes, with a secret beside it, and links there."""
    base = tmp_path_factory.mktemp("folders")
    root = base / "prefixes"
    write_prefix(root / "sql", TINY, 21, seed=1)
    write_prefix(root / "team" / "chat", TINY, 32, seed=2)
    write_prefix(root / "long", TINY, 300)
    write_prefix(root / "other", (3, 2, 32), 5)
    np.save(root / "short.npy", random_prefix(TINY, 5, 3))
    secret = write_prefix(base / "secret", TINY, 5, seed=4)
    (root / "link.npy").symlink_to(secret / "pre_caches.npy")
    (root / "inner.npy").symlink_to(root / "short.npy")
    (root / "mixed").mkdir()
    (root / "mixed" / "pre_caches.npy").symlink_to(secret / "pre_caches.npy")
    os.mkfifo(root / "pipe.npy")
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ScriptedServer]:
    made = config_of(TOKENIZER)
    engine = made.engine.changed(prefix_path=("fixed=somewhere",), allow_adapter_updates=True)
    made = replace(made, engine=engine, adapter_root=str(root))
    with ScriptedServer(made, lambda prompt, params: ["a"]) as server:
        yield server


@pytest.fixture
def clean(server: ScriptedServer, client: httpx.Client) -> Iterator[httpx.Client]:
    """A client; what it has loaded is unloaded afterwards."""
    yield client
    server.engine.adapter_error = None
    for name in list(server.engine.prefixes):
        client.post(UNLOAD, json={"prefix_name": name})


def load(client: httpx.Client, name: str, path: str) -> httpx.Response:
    return client.post(LOAD, json={"prefix_name": name, "prefix_path": path})


def names(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


@pytest.mark.parametrize("path", ["sql", "team/../sql", "short.npy", "inner.npy", "{root}/sql"])
def test_prefixes_come_and_go(
    server: ScriptedServer, clean: httpx.Client, root: Path, path: str
) -> None:
    card = load(clean, "mine", path.format(root=root)).json()
    assert (card["id"], card["parent"]) == ("mine", "test")
    found = root / ("short.npy" if path.endswith(".npy") else "sql")
    assert server.engine.adapters == {"mine": str(found)}
    assert names(clean) == ["test", "fixed", "mine"]
    assert clean.post("/v1/completions", json={"prompt": "x", "model": "mine"}).is_success
    assert server.engine.added[-1][1].adapter == "mine"
    gone = clean.post(UNLOAD, json={"prefix_name": "mine"})
    assert gone.json() == {"id": "mine", "object": "model", "deleted": True}
    assert names(clean) == ["test", "fixed"]
    assert clean.post("/v1/completions", json={"prompt": "x", "model": "mine"}).status_code == 404


@pytest.mark.parametrize("path", ["..", "../secret", "/etc", "link.npy", "mixed", "../no.npy"])
def test_nothing_outside_the_root_is_read_or_told_of(
    server: ScriptedServer, clean: httpx.Client, path: str
) -> None:
    answer = load(clean, "a", path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "prefix_path")
    assert server.engine.adapters == {}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"prefix_name": "a", "prefix_path": "missing"}, 404, "prefix_path"),
        ({"prefix_name": "a", "prefix_path": "pipe.npy"}, 404, "prefix_path"),
        ({"prefix_name": "a", "prefix_path": "x\0y"}, 400, "prefix_path"),
        ({"prefix_name": "a"}, 400, "prefix_path"),
        ({"prefix_path": "sql"}, 400, "prefix_name"),
        ({"prefix_name": "", "prefix_path": "sql"}, 400, "prefix_name"),
        ({"prefix_name": "test", "prefix_path": "sql"}, 400, "prefix_name"),
        ({"prefix_name": "fixed", "prefix_path": "sql"}, 400, "prefix_name"),
        ({"prefix_name": "a", "prefix_path": "sql", "rank": 3}, 400, "rank"),
    ],
)
def test_what_is_wrong_with_a_load_is_told(
    server: ScriptedServer, clean: httpx.Client, body: dict[str, Any], status: int, param: str
) -> None:
    answer = clean.post(LOAD, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert server.engine.adapters == {}
    assert names(clean) == ["test", "fixed"]


def test_what_fails_leaves_all_as_it_was(
    server: ScriptedServer, clean: httpx.Client, root: Path
) -> None:
    server.engine.adapter_error = UserError(f"{root / 'sql'}: was trained for another model")
    answer = load(clean, "a", "sql")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "sql: was trained for another model"
    server.engine.adapter_error = AdapterFailed("MemoryError: no room")
    assert load(clean, "a", "sql").status_code == 500
    server.engine.adapter_error = None
    assert load(clean, "a", "sql").is_success
    server.engine.adapter_error = AdapterFailed("it is stuck")
    assert clean.post(UNLOAD, json={"prefix_name": "a"}).status_code == 500
    assert names(clean) == ["test", "fixed", "a"]
    missing = clean.post(UNLOAD, json={"prefix_name": "b"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "prefix_name")
    assert "(loaded: fixed, a)" in missing.json()["error"]["message"]


def test_without_the_flag_prefixes_are_fixed() -> None:
    made = config_of(TOKENIZER)
    made = replace(made, engine=made.engine.changed(prefix_path=("fixed=somewhere",)))
    with (
        ScriptedServer(made, lambda prompt, params: ["a"]) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        refused = client.post(UNLOAD, json={"prefix_name": "fixed"})
        for answer in (load(client, "a", "sql"), refused):
            assert answer.status_code == 403
            assert "--allow_adapter_updates" in answer.json()["error"]["message"]
        assert names(client) == ["test", "fixed"]


# With a model


@pytest.fixture(scope="module")
def serving(model: Path, root: Path) -> Iterator[httpx.Client]:
    engine = config(
        model,
        prefix_path=(f"chat={root / 'team' / 'chat'}",),
        allow_adapter_updates=True,
        num_cache_blocks=2 + 16 + 4,
    )
    made = ServerConfig(engine=engine, served_model_names=("base",), adapter_root=str(root))
    with (
        ModelServer(made) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def expected(model: Path, root: Path) -> dict[str, str]:
    """By model: its answer, of an engine alone."""
    paths = {"sql": root / "sql", "chat": root / "team" / "chat", "short": root / "short.npy"}
    llm = LLM(config(model, prefix_path=tuple(f"{n}={path}" for n, path in paths.items())))
    found = {"base": llm.generate([PROMPT], GREEDY)[0].text}
    for name in paths:
        found[name] = llm.generate([PROMPT], replace(GREEDY, adapter=name))[0].text
    assert len(set(found.values())) == 4
    return found


def said(client: httpx.Client, model: str) -> str:
    answer = client.post("/v1/completions", json={**ASK, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def counts(client: httpx.Client) -> tuple[float, ...]:
    """Prefixes, their blocks, all blocks that are in use."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    wanted = ("prefixes_loaded", "prefix_blocks", "kv_cache_used_blocks")
    return tuple(found[f"regatta_{name}"] for name in wanted)


def test_each_model_answers_as_it_does_alone_and_counts_tell(
    serving: httpx.Client, expected: dict[str, str]
) -> None:
    assert counts(serving) == (1, 2, 2)
    assert load(serving, "sql", "sql").is_success
    assert load(serving, "short", "short.npy").is_success
    assert counts(serving) == (3, 5, 5)
    for _ in range(2):
        for model, text in expected.items():
            assert said(serving, model) == text
    for name in ("sql", "short"):
        assert serving.post(UNLOAD, json={"prefix_name": name}).is_success
        refused = serving.post("/v1/completions", json={**ASK, "model": name})
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"
    assert counts(serving) == (1, 2, 2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("long", "max_length is 256 tokens"),
        ("other", "trained for another model"),
        ("empty", "it holds no prefix"),
    ],
)
def test_a_load_that_fails_loses_nothing(
    serving: httpx.Client, expected: dict[str, str], path: str, message: str
) -> None:
    answer = load(serving, "a", path)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert counts(serving) == (1, 2, 2)
    assert said(serving, "chat") == expected["chat"]


def test_what_runs_goes_on_when_its_prefix_is_unloaded(model: Path, root: Path) -> None:
    prefixes = (f"sql={root / 'sql'}",)
    alone = LLM(config(model, prefix_path=prefixes))
    wanted = alone.generate([PROMPT], replace(LONG, adapter="sql"))[0].text
    with running(config(model, prefix_path=prefixes, allow_adapter_updates=True)) as engine:
        client = engine.client

        async def main() -> None:
            await client.ready()
            params: SamplingParams = replace(LONG, adapter="sql")
            answer = client.add(PROMPT, params, streamed=True)
            pieces = await answer.__anext__()
            await client.unload_prefix("sql")
            assert (await client.stats()).num_prefix_blocks == 2
            with pytest.raises(UserError, match=r"adapter is 'sql' \(loaded: none\)"):
                await all_pieces(client, PROMPT, params)
            await client.load_prefix("sql", str(root / "team" / "chat"))  # another one
            other = await all_pieces(client, PROMPT, params)
            async for more in answer:
                pieces += more
            assert texts(pieces) == [wanted]
            assert texts(other) != [wanted]
            with pytest.raises(UserError, match="is loaded already"):
                await client.load_prefix("sql", str(root / "sql"))
            await client.unload_prefix("sql")
            with pytest.raises(UserError, match=r"prefix is 'sql' \(loaded: none\)"):
                await client.unload_prefix("sql")
            stats = await nothing_runs(client)
            assert (stats.num_prefixes, stats.num_prefix_blocks, stats.num_used_blocks) == (0, 0, 0)

        engine.run(main())
