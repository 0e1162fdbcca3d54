"""Adapters and prefixes over HTTP: named as models, loaded from one folder alone, gone again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.config.adapters import Change
from predict.errors import UserError
from predict.server.config import ServerConfig
from predict.server.engine_client import ChangeFailed
from predict.server.flags import parse
from predict.server.from_flags import server_config
from tests.golden.prefixes import random_prefix
from tests.server.conftest import TEMPLATE
from tests.server.engines import (
    GREEDY,
    Running,
    all_pieces,
    config,
    nothing_runs,
    running,
    texts,
)
from tests.support.adapters import write_adapter
from tests.support.http_server import SECONDS, ModelServer, ScriptedServer, config_of
from tests.support.prefixes import TINY, write_prefix
from tests.support.tiny import CONFIG, TOKENIZER

PROMPT = [5, 9, 11, 30]
NUM_TOKENS = 64  # of answers that run while something is loaded or unloaded
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


def write_adapters(root: Path, secret: Path) -> None:
    write_adapter(root / "sql", CONFIG, 8, seed=1)
    write_adapter(root / "team" / "chat", CONFIG, 4, seed=2)
    write_adapter(root / "large", CONFIG, 64, seed=3)
    write_adapter(secret, CONFIG, 4, seed=4)
    (root / "link").symlink_to(secret)
    (root / "inner").symlink_to(root / "sql")
    (root / "mixed").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "mixed" / name).symlink_to(secret / name)
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "adapter_config.json")
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")


def write_prefixes(root: Path, secret: Path) -> None:
    write_prefix(root / "sql", TINY, 21, seed=1)
    write_prefix(root / "team" / "chat", TINY, 32, seed=2)
    write_prefix(root / "long", TINY, 300)
    write_prefix(root / "other", (3, 2, 32), 5)
    np.save(root / "short.npy", random_prefix(TINY, 5, 3))
    write_prefix(secret, TINY, 5, seed=4)
    (root / "link.npy").symlink_to(secret / "pre_caches.npy")
    (root / "inner.npy").symlink_to(root / "short.npy")
    (root / "mixed").mkdir()
    (root / "mixed" / "pre_caches.npy").symlink_to(secret / "pre_caches.npy")
    os.mkfifo(root / "pipe.npy")
    (root / "empty").mkdir()


@dataclass(frozen=True)
class Kind:
    """What may be loaded, and how."""

    name: str
    setting: str  # of an EngineConfig, for those that are there from the start
    word: str  # ahead of the names of a body's fields
    write: Callable[[Path, Path], None]  # the root's files, and a secret beside it
    # By path: the file or folder that it leads to; {root} stands for the root.
    inside: dict[str, str]
    outside: tuple[str, ...]
    wrong: dict[str, int]  # by path: the status
    counts: tuple[str, ...]  # among the metrics

    @property
    def load_route(self) -> str:
        return f"/v1/load_{self.name}"

    @property
    def unload_route(self) -> str:
        return f"/v1/unload_{self.name}"

    def body(self, name: str, path: str | None = None) -> dict[str, Any]:
        fields = {f"{self.word}_name": name}
        return fields if path is None else {**fields, f"{self.word}_path": path}

    def load(self, client: httpx.Client, name: str, path: str) -> httpx.Response:
        return client.post(self.load_route, json=self.body(name, path))

    def unload(self, client: httpx.Client, name: str) -> httpx.Response:
        return client.post(self.unload_route, json=self.body(name))

    def counted(self, client: httpx.Client) -> tuple[float, ...]:
        families = text_string_to_metric_families(client.get("/metrics").text)
        found = {sample.name: sample.value for family in families for sample in family.samples}
        return tuple(found[f"regatta_{name}"] for name in self.counts)


ADAPTER = Kind(
    "lora_adapter",
    "lora_modules",
    "lora",
    write_adapters,
    dict.fromkeys(("sql", "./sql", "team/../sql", "inner", "{root}/sql"), "sql"),
    (
        *("..", "../secret", "../files_too", "/", "/etc", "/no/such/folder", "../missing"),
        *("link", "link/../../secret", "mixed", "{root}/../secret", "{root}_too"),
    ),
    {"missing": 404, "sql/adapter_config.json": 404, "pipe": 400},
    ("adapters_loaded", "adapter_pages", "adapter_used_pages", "adapters_written_total"),
)
PREFIX = Kind(
    "prefix",
    "prefix_path",
    "prefix",
    write_prefixes,
    {
        **dict.fromkeys(("sql", "team/../sql", "{root}/sql"), "sql"),
        **dict.fromkeys(("short.npy", "inner.npy"), "short.npy"),
    },
    ("..", "../secret", "/etc", "link.npy", "mixed", "../no.npy"),
    {"missing": 404, "pipe.npy": 404},
    ("prefixes_loaded", "prefix_blocks", "kv_cache_used_blocks"),
)


@pytest.fixture(scope="module", params=[ADAPTER, PREFIX], ids=lambda kind: kind.word)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """By kind: `files` that may be loaded, with a secret beside them, and links there."""
    folders = tmp_path_factory.mktemp("folders")
    for kind in (ADAPTER, PREFIX):
        base = folders / kind.word
        (base / "files").mkdir(parents=True)
        (base / "files_too").mkdir()
        kind.write(base / "files", base / "secret")
    return folders


@pytest.fixture(scope="module")
def root(kind: Kind, folders: Path) -> Path:
    """The folder of what may be loaded."""
    return folders / kind.word / "files"


def scripted(kind: Kind, root: Path | None, **changes: Any) -> ScriptedServer:
    """A server with one "fixed", where others may be loaded if there is a root."""
    made = config_of(TOKENIZER, TEMPLATE)
    settings: dict[str, Any] = {
        kind.setting: ("fixed=somewhere",),
        "allow_adapter_updates": root is not None,
    }
    path = None if root is None else str(root)
    made = replace(made, engine=made.engine.changed(**settings), adapter_root=path, **changes)
    return ScriptedServer(made, lambda prompt, params: ["a"])


@pytest.fixture(scope="module")
def server(kind: Kind, root: Path) -> Iterator[ScriptedServer]:
    with scripted(kind, root) as server:
        yield server


@pytest.fixture
def clean(kind: Kind, server: ScriptedServer, client: httpx.Client) -> Iterator[httpx.Client]:
    """A client; what it has loaded is unloaded afterwards."""
    yield client
    server.engine.adapter_error = None
    for name in [*server.engine.adapters, *server.engine.prefixes]:
        kind.unload(client, name)


def names(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").json()["data"]]


def test_models_are_the_base_and_its_adapters(clean: httpx.Client) -> None:
    base, fixed = clean.get("/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == ("test", None)
    assert (fixed["id"], fixed["parent"]) == ("fixed", "test")
    assert clean.get("/v1/models/fixed").json() == fixed
    assert clean.get("/v1/models/fixd").status_code == 404


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
        ("/v1/chat/completions", {"context": "x"}),
        ("/v1/chat/completions", {"context": "x", "stream": False}),
        ("/v1/chat/completions", {"text": "x"}),
        ("/v1/chat/completions/completions", {"prompt": "x"}),
        ("/api/chat", {"context": "x"}),
    ],
)
def test_a_request_s_model_names_an_adapter(
    server: ScriptedServer, clean: httpx.Client, path: str, body: dict[str, Any]
) -> None:
    for model, adapter in ((None, None), ("test", None), ("fixed", "fixed")):
        answer = clean.post(path, json={**body, "model": model})
        assert answer.status_code == 200
        assert server.engine.added[-1][1].adapter == adapter
    assert clean.post(path, json={**body, "model": "fixd"}).status_code == 404


def test_a_chat_may_name_one_and_its_answer_says_so(
    server: ScriptedServer, clean: httpx.Client
) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "model": "fixed"}
    answer = clean.post("/v1/chat/completions", json=body)
    assert answer.json()["model"] == "fixed"
    assert server.engine.added[-1][1].adapter == "fixed"
    assert clean.post("/tokenize", json={"prompt": "a", "model": "fixed"}).is_success


def test_what_is_loaded_comes_and_goes(
    kind: Kind, server: ScriptedServer, clean: httpx.Client, root: Path
) -> None:
    for path, leads_to in kind.inside.items():
        card = kind.load(clean, "mine", path.format(root=root)).json()
        assert (card["id"], card["parent"]) == ("mine", "test")
        assert server.engine.adapters == {"mine": str(root / leads_to)}, path
        assert names(clean) == ["test", "fixed", "mine"]
        ask = {"prompt": "x", "model": "mine"}
        assert clean.post("/v1/completions", json=ask).is_success
        assert server.engine.added[-1][1].adapter == "mine"
        gone = kind.unload(clean, "mine")
        assert gone.json() == {"id": "mine", "object": "model", "deleted": True}
        assert names(clean) == ["test", "fixed"]
        assert clean.post("/v1/completions", json=ask).status_code == 404


def test_nothing_outside_the_root_is_read_or_told_of(
    kind: Kind, server: ScriptedServer, clean: httpx.Client, root: Path
) -> None:
    for path in kind.outside:
        answer = kind.load(clean, "a", path.format(root=root))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (403, f"{kind.word}_path"), path
        assert "leads out of the folder" in error["message"]
        assert str(root.parent) not in error["message"].replace(path.format(root=root), "")
        assert server.engine.adapters == {}


@pytest.mark.parametrize(
    ("name", "path", "more", "param"),
    [
        *(("a", path, {}, "path") for path in ("x\0y", "x" * 4000, "", None)),
        *((name, "sql", {}, "name") for name in (None, "", "a\n", "a" * 201, "test", "fixed")),
        ("a", "sql", {"rank": 3}, "rank"),
    ],
)
def test_what_is_wrong_with_a_load_is_told(
    kind: Kind,
    server: ScriptedServer,
    clean: httpx.Client,
    name: str | None,
    path: str | None,
    more: dict[str, Any],
    param: str,
) -> None:
    fields = {f"{kind.word}_name": name, f"{kind.word}_path": path, **more}
    body = {key: value for key, value in fields.items() if value is not None}
    answer = clean.post(kind.load_route, json=body)
    found = answer.json()["error"]["param"].removeprefix(f"{kind.word}_")
    assert (answer.status_code, found) == (400, param)
    assert server.engine.adapters == {}
    assert names(clean) == ["test", "fixed"]


def test_what_is_there_and_cannot_be_loaded_is_told(
    kind: Kind, server: ScriptedServer, clean: httpx.Client
) -> None:
    for path, status in kind.wrong.items():
        answer = kind.load(clean, "a", path)
        found = answer.status_code, answer.json()["error"]["param"]
        assert found == (status, f"{kind.word}_path"), path
    assert server.engine.adapters == {}


@pytest.mark.parametrize("kind", [ADAPTER], indirect=True)
def test_an_adapter_is_not_loaded_in_the_place_of_another(kind: Kind, clean: httpx.Client) -> None:
    answer = clean.post(kind.load_route, json={**kind.body("a", "sql"), "load_inplace": True})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "load_inplace")
    assert kind.load(clean, "a", "sql").is_success
    assert clean.post(kind.unload_route, json={**kind.body("a"), "lora_int_id": 7}).is_success


def test_what_fails_leaves_all_as_it_was(
    kind: Kind, server: ScriptedServer, clean: httpx.Client, root: Path
) -> None:
    server.engine.adapter_error = UserError(f"{root / 'sql'}: was trained for another model")
    answer = kind.load(clean, "a", "sql")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "sql: was trained for another model"
    server.engine.adapter_error = ChangeFailed("MemoryError: no room")
    assert kind.load(clean, "a", "sql").status_code == 500
    assert names(clean) == ["test", "fixed"]
    server.engine.adapter_error = None
    assert kind.load(clean, "a", "sql").is_success
    server.engine.adapter_error = ChangeFailed("it is stuck")
    assert kind.unload(clean, "a").status_code == 500
    assert names(clean) == ["test", "fixed", "a"]
    missing = kind.unload(clean, "b")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, f"{kind.word}_name")
    assert "(loaded: fixed, a)" in missing.json()["error"]["message"]


def test_without_the_flag_all_are_fixed(kind: Kind) -> None:
    with (
        scripted(kind, None) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        for answer in (kind.load(client, "a", "sql"), kind.unload(client, "fixed")):
            assert answer.status_code == 403
            assert "--allow_adapter_updates" in answer.json()["error"]["message"]
        assert names(client) == ["test", "fixed"]


def test_prefixes_are_models_of_another_kind(tmp_path: Path) -> None:
    made = config_of(TOKENIZER)
    engine = made.engine.changed(
        prefix_path=("somewhere", "tuned=elsewhere"), allow_adapter_updates=True
    )
    made = replace(made, engine=engine, adapter_root=str(tmp_path))
    with (
        ScriptedServer(made, lambda prompt, params: ["a"]) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        assert names(client) == ["test", "tuned"]
        for model, adapter in (("tuned", "tuned"), ("test", None)):
            assert client.post("/v1/completions", json={"prompt": "x", "model": model}).is_success
            assert server.engine.added[-1][1].adapter == adapter
        assert ADAPTER.load(client, "tuned", "sql").status_code == 400
        answer = ADAPTER.unload(client, "tuned")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "lora_name"
        assert "/v1/unload_prefix unloads it" in error["message"]
        assert names(client) == ["test", "tuned"]


def test_a_key_is_needed_where_there_is_one(kind: Kind, root: Path) -> None:
    with (
        scripted(kind, root, api_keys=("secret",)) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        assert kind.load(client, "a", "sql").status_code == 401
        assert server.engine.adapters == {}


def test_flags_that_let_clients_load_stand_together(tmp_path: Path, model: Path) -> None:
    words = ["--model_name_or_path", str(model), "--dtype", "float32", "--device", "cpu"]
    root = ["--adapter_root", str(tmp_path)]
    for some in (["--allow_adapter_updates"], root):
        with pytest.raises(UserError, match=r"--allow_adapter_updates|--adapter_root"):
            server_config(parse([*words, *some]), {})
    absent = ["--adapter_root", str(tmp_path / "absent")]
    with pytest.raises(UserError, match="is no folder"):
        server_config(parse([*words, "--allow_adapter_updates", *absent]), {})
    made, notes = server_config(parse([*words, "--allow_adapter_updates", *root]), {})
    assert made.engine.adapters.is_used
    assert any("without --api_key" in note for note in notes)
    with pytest.raises(UserError, match="the model's name too"):
        server_config(parse([*words, "--lora_modules", f"{model.name}={tmp_path}"]), {})
    with pytest.raises(UserError, match=r"--prefix_path has an adapter .*the model's name too"):
        server_config(parse([*words, "--prefix_path", f"{model.name}={tmp_path}"]), {})


# With a model


def named(folders: Path, *names: str) -> dict[str, tuple[str, ...]]:
    """Settings of an engine that has these of both kinds: lora-sql, prefix-sql and so on."""
    return {
        kind.setting: tuple(
            f"{kind.word}-{Path(name).name}={folders / kind.word / 'files' / name}"
            for name in names
        )
        for kind in (ADAPTER, PREFIX)
    }


@pytest.fixture(scope="module", params=["dynamic", "static"])
def serving(
    request: pytest.FixtureRequest,
    model: Path,
    folders: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """With one of each kind, "chat", and room for no more than another one."""
    if request.param == "static":
        program = tmp_path_factory.mktemp("program") / "static"
        export_model(config(model), program, enable_lora=True)
        model = program
    engine = config(
        model,
        mode=request.param,
        allow_adapter_updates=True,
        chat_template=str(TEMPLATE),
        num_cache_blocks=2 + 16 + 4,
        max_loras=1,
        max_lora_rank=8,
        max_cpu_loras=1,
        **named(folders, "team/chat"),
    )
    made = ServerConfig(engine=engine, served_model_names=("base",), adapter_root=str(folders))
    with (
        ModelServer(made) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def alone(model: Path, folders: Path) -> LLM:
    """An engine alone, with all that the tests load."""
    return LLM(config(model, **named(folders, "sql", "team/chat")))


@pytest.fixture(scope="module")
def expected(kind: Kind, alone: LLM) -> dict[str, str]:
    """By model: its answer, of an engine alone."""
    found = {"base": alone.generate([PROMPT], GREEDY)[0].text}
    for name in (f"{kind.word}-sql", f"{kind.word}-chat"):
        found[name] = alone.generate([PROMPT], replace(GREEDY, adapter=name))[0].text
    assert len(set(found.values())) == 3
    return found


def said(client: httpx.Client, model: str) -> str:
    answer = client.post("/v1/completions", json={**ASK, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


# The counts before a load, behind it, once each model has answered twice, and behind the unload.
# There is room for one adapter at a time: each took the other's place. A prefix keeps its blocks.
COUNTS: dict[str, list[tuple[float, ...]]] = {
    "lora": [(1, 1, 0, 0), (2, 1, 0, 0), (2, 1, 1, 4), (1, 1, 1, 4)],
    "prefix": [(1, 2, 2), (2, 4, 4), (2, 4, 4), (1, 2, 2)],
}


def test_each_model_answers_as_it_does_alone_and_counts_tell(
    kind: Kind, serving: httpx.Client, expected: dict[str, str]
) -> None:
    before, loaded, used, unloaded = COUNTS[kind.word]
    name = f"{kind.word}-sql"
    assert kind.counted(serving) == before
    assert kind.load(serving, name, f"{kind.word}/files/sql").is_success
    assert kind.counted(serving) == loaded
    for _ in range(2):
        for model, text in expected.items():
            assert said(serving, model) == text
    assert kind.counted(serving) == used
    assert kind.unload(serving, name).is_success
    assert kind.counted(serving)[0] == unloaded[0]
    if kind is PREFIX:
        assert kind.counted(serving) == unloaded
    refused = serving.post("/v1/completions", json={**ASK, "model": name})
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"


FAILING = {
    "lora": {"large": "--max_lora_rank", "broken": "not valid JSON", "team": "neither"},
    "prefix": {
        "long": "max_length is 256 tokens",
        "other": "trained for another model",
        "empty": "it holds no prefix",
    },
}


def test_a_load_that_fails_loses_nothing(
    kind: Kind, serving: httpx.Client, expected: dict[str, str]
) -> None:
    name = f"{kind.word}-chat"
    body = {**ASK, "model": name, "stream": True, "max_tokens": NUM_TOKENS}
    for path, message in FAILING[kind.word].items():
        with serving.stream("POST", "/v1/completions", json=body) as running_answer:
            lines = running_answer.iter_lines()
            next(lines)
            answer = kind.load(serving, "a", f"{kind.word}/files/{path}")
            assert answer.status_code == 400, path
            assert message in answer.json()["error"]["message"]
            *_, last = filter(None, lines)
            assert last == "data: [DONE]"
        assert said(serving, name) == expected[name]
    assert kind.counted(serving)[0] == 1


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Running]:
    """A process that has neither adapters nor prefixes yet."""
    with running(config(model, allow_adapter_updates=True)) as engine:
        engine.run(engine.client.ready())
        yield engine


def test_what_runs_goes_on_when_what_it_names_is_unloaded(
    kind: Kind, engine: Running, alone: LLM, root: Path
) -> None:
    params: SamplingParams = replace(GREEDY, max_new_tokens=NUM_TOKENS, adapter="sql")
    named_alone = replace(params, adapter=f"{kind.word}-sql")
    wanted = alone.generate([PROMPT], named_alone)[0].text
    client = engine.client
    is_prefix = kind is PREFIX
    change = partial(Change, "prefix" if is_prefix else "adapter", "sql")

    async def main() -> None:
        await client.change(change(str(root / "sql")))
        answer = client.add(PROMPT, params, streamed=True)
        pieces = await answer.__anext__()
        await client.change(change())
        assert (await client.stats()).num_prefix_blocks == 2 * is_prefix
        with pytest.raises(UserError, match=r"adapter is 'sql' \(loaded: none\)"):
            await all_pieces(client, PROMPT, params)
        await client.change(change(str(root / "team" / "chat")))  # another one
        other = await all_pieces(client, PROMPT, params)
        async for more in answer:
            pieces += more
        assert texts(pieces) == [wanted]
        assert texts(other) != [wanted]
        with pytest.raises(UserError, match="is loaded already"):
            await client.change(change(str(root / "sql")))
        await client.change(change())
        with pytest.raises(UserError, match=r"is 'sql' \(loaded: none\)"):
            await client.change(change())
        stats = await nothing_runs(client)
        assert (stats.num_adapters, stats.num_prefixes, stats.num_prefix_blocks) == (0, 0, 0)

    engine.run(main())
