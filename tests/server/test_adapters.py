"""Adapters over HTTP: named as models, loaded from one folder alone, and gone without a trace."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from export.export_model import export_model
from predict import LLM, SamplingParams
from predict.errors import UserError
from predict.request import RequestOutput
from predict.server.config import ServerConfig
from predict.server.engine_client import AdapterFailed
from predict.server.flags import parse
from predict.server.from_flags import server_config
from tests.server.engines import GREEDY, LONG, all_pieces, config, nothing_runs, running, texts
from tests.support.adapters import write_adapter
from tests.support.http_server import SECONDS, ModelServer, ScriptedServer, config_of
from tests.support.tiny import CONFIG, TOKENIZER

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = [5, 9, 11, 30]
ASK: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of adapters, with a secret beside it, and links there."""
    base = tmp_path_factory.mktemp("folders")
    root = base / "adapters"
    write_adapter(root / "sql", CONFIG, 8, seed=1)
    write_adapter(root / "team" / "chat", CONFIG, 4, seed=2)
    write_adapter(root / "large", CONFIG, 64, seed=3)
    secret = write_adapter(base / "secret", CONFIG, 4, seed=4)
    (base / "adapters_too").mkdir()
    (root / "link").symlink_to(secret)
    (root / "inner").symlink_to(root / "sql")
    (root / "mixed").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (root / "mixed" / name).symlink_to(secret / name)
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "adapter_config.json")
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    return root


def scripted(root: Path | None, **changes: Any) -> ScriptedServer:
    """A server with an adapter "fixed", and perhaps others."""
    made = config_of(TOKENIZER)
    engine = made.engine.changed(
        lora_modules=("fixed=somewhere",), allow_adapter_updates=root is not None
    )
    path = None if root is None else str(root)
    made = replace(made, engine=engine, adapter_root=path, **changes)
    return ScriptedServer(made, lambda prompt, params: ["a"])


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ScriptedServer]:
    with scripted(root) as server:
        yield server


@pytest.fixture
def clean(server: ScriptedServer, client: httpx.Client) -> Iterator[httpx.Client]:
    """A client; what it has loaded is unloaded afterwards."""
    yield client
    server.engine.adapter_error = None
    for name in list(server.engine.adapters):
        client.post(UNLOAD, json={"lora_name": name})


def load(client: httpx.Client, name: str, path: str) -> httpx.Response:
    return client.post(LOAD, json={"lora_name": name, "lora_path": path})


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


def test_a_chat_may_name_one_and_its_answer_says_so(root: Path) -> None:
    template = Path(__file__).parent / "templates" / "tools.jinja"
    made = config_of(TOKENIZER, template)
    engine = made.engine.changed(lora_modules=("fixed=somewhere",))
    with (
        ScriptedServer(replace(made, engine=engine), lambda prompt, params: ["a"]) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        body = {"messages": [{"role": "user", "content": "hi"}], "model": "fixed"}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.json()["model"] == "fixed"
        assert server.engine.added[-1][1].adapter == "fixed"
        assert client.post("/tokenize", json={"prompt": "a", "model": "fixed"}).is_success


def test_adapters_come_and_go(server: ScriptedServer, clean: httpx.Client, root: Path) -> None:
    card = load(clean, "sql", "sql").json()
    assert (card["id"], card["parent"]) == ("sql", "test")
    assert server.engine.adapters == {"sql": str(root / "sql")}
    assert names(clean) == ["test", "fixed", "sql"]
    assert clean.post("/v1/completions", json={"prompt": "x", "model": "sql"}).is_success
    gone = clean.post(UNLOAD, json={"lora_name": "sql", "lora_int_id": 7})
    assert gone.json() == {"id": "sql", "object": "model", "deleted": True}
    assert names(clean) == ["test", "fixed"]
    assert clean.post("/v1/completions", json={"prompt": "x", "model": "sql"}).status_code == 404


@pytest.mark.parametrize("path", ["sql", "./sql", "team/../sql", "inner", "{root}/sql"])
def test_a_path_may_lead_below_the_root_in_any_way(
    server: ScriptedServer, clean: httpx.Client, root: Path, path: str
) -> None:
    assert load(clean, "a", path.format(root=root)).is_success
    assert server.engine.adapters == {"a": str(root / "sql")}


@pytest.mark.parametrize(
    "path",
    [
        *("..", "../secret", "../adapters_too", "/", "/etc", "/no/such/folder", "../missing"),
        *("link", "link/../../secret", "mixed", "{root}/../secret", "{root}_too"),
    ],
)
def test_nothing_outside_the_root_is_read_or_told_of(
    server: ScriptedServer, clean: httpx.Client, root: Path, path: str
) -> None:
    answer = load(clean, "a", path.format(root=root))
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert error["param"] == "lora_path"
    assert "leads out of the folder" in error["message"]
    assert str(root.parent) not in error["message"].replace(path.format(root=root), "")
    assert server.engine.adapters == {}


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"lora_name": "a", "lora_path": "missing"}, 404, "lora_path"),
        ({"lora_name": "a", "lora_path": "sql/adapter_config.json"}, 404, "lora_path"),
        ({"lora_name": "a", "lora_path": "pipe"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "x\0y"}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": "x" * 4000}, 400, "lora_path"),
        ({"lora_name": "a", "lora_path": ""}, 400, "lora_path"),
        ({"lora_name": "a"}, 400, "lora_path"),
        ({"lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "", "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "a\n", "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "a" * 201, "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "test", "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "fixed", "lora_path": "sql"}, 400, "lora_name"),
        ({"lora_name": "a", "lora_path": "sql", "load_inplace": True}, 400, "load_inplace"),
        ({"lora_name": "a", "lora_path": "sql", "rank": 3}, 400, "rank"),
    ],
)
def test_what_is_wrong_with_a_load_is_told(
    server: ScriptedServer, clean: httpx.Client, body: dict[str, Any], status: int, param: str
) -> None:
    answer = clean.post(LOAD, json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert server.engine.adapters == {}
    assert names(clean) == ["test", "fixed"]


def test_what_the_engine_refuses_is_not_there(
    server: ScriptedServer, clean: httpx.Client, root: Path
) -> None:
    server.engine.adapter_error = UserError(f"{root / 'sql'}: the adapter has rank 64")
    answer = load(clean, "a", "sql")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "sql: the adapter has rank 64"
    server.engine.adapter_error = AdapterFailed("MemoryError: no room")
    assert load(clean, "a", "sql").status_code == 500
    assert names(clean) == ["test", "fixed"]
    server.engine.adapter_error = None
    assert load(clean, "a", "sql").is_success


def test_an_unload_that_fails_leaves_the_adapter(
    server: ScriptedServer, clean: httpx.Client
) -> None:
    assert load(clean, "a", "sql").is_success
    server.engine.adapter_error = AdapterFailed("it is stuck")
    assert clean.post(UNLOAD, json={"lora_name": "a"}).status_code == 500
    assert names(clean) == ["test", "fixed", "a"]
    missing = clean.post(UNLOAD, json={"lora_name": "b"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_name")


def test_without_the_flag_adapters_are_fixed() -> None:
    with (
        scripted(None) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        for answer in (load(client, "a", "sql"), client.post(UNLOAD, json={"lora_name": "fixed"})):
            assert answer.status_code == 403
            assert "--allow_adapter_updates" in answer.json()["error"]["message"]
        assert names(client) == ["test", "fixed"]


def test_prefixes_are_models_of_another_kind(root: Path) -> None:
    made = config_of(TOKENIZER)
    engine = made.engine.changed(
        prefix_path=("somewhere", "tuned=elsewhere"), allow_adapter_updates=True
    )
    made = replace(made, engine=engine, adapter_root=str(root))
    with (
        ScriptedServer(made, lambda prompt, params: ["a"]) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        assert names(client) == ["test", "tuned"]
        for model, adapter in (("tuned", "tuned"), ("test", None)):
            assert client.post("/v1/completions", json={"prompt": "x", "model": model}).is_success
            assert server.engine.added[-1][1].adapter == adapter
        assert load(client, "tuned", "sql").status_code == 400
        answer = client.post(UNLOAD, json={"lora_name": "tuned"})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["param"] == "lora_name"
        assert "/v1/unload_prefix unloads it" in error["message"]
        assert names(client) == ["test", "tuned"]


def test_a_key_is_needed_where_there_is_one(root: Path) -> None:
    with (
        scripted(root, api_keys=("secret",)) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        assert load(client, "a", "sql").status_code == 401
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


@pytest.fixture(scope="module", params=["dynamic", "static"])
def serving(
    request: pytest.FixtureRequest,
    model: Path,
    root: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    if request.param == "static":
        folder = tmp_path_factory.mktemp("program") / "static"
        export_model(config(model), folder, enable_lora=True)
        model = folder
    engine = config(
        model,
        mode=request.param,
        lora_modules=(f"chat={root / 'team' / 'chat'}",),
        allow_adapter_updates=True,
        max_loras=1,
        max_lora_rank=8,
        max_cpu_loras=1,
        chat_template=str(Path(__file__).parent / "templates" / "tools.jinja"),
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
    paths = {"sql": root / "sql", "chat": root / "team" / "chat"}
    modules = tuple(f"{name}={path}" for name, path in paths.items())
    llm = LLM(config(model, lora_modules=modules))
    found = {"base": llm.generate([PROMPT], GREEDY)[0].text}
    for name in paths:
        found[name] = llm.generate([PROMPT], replace(GREEDY, adapter=name))[0].text
    assert len(set(found.values())) == 3
    return found


def said(client: httpx.Client, model: str) -> str:
    answer = client.post("/v1/completions", json={**ASK, "model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def adapter_counts(client: httpx.Client) -> list[float]:
    """Loaded, pages, used pages, written."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    found = {sample.name: sample.value for family in families for sample in family.samples}
    counts = ("adapters_loaded", "adapter_pages", "adapter_used_pages", "adapters_written_total")
    return [found[f"regatta_{name}"] for name in counts]


def test_each_model_answers_as_it_does_alone_and_counts_tell(
    serving: httpx.Client, expected: dict[str, str]
) -> None:
    assert adapter_counts(serving) == [1, 1, 0, 0]
    assert load(serving, "sql", "sql").is_success
    for _ in range(2):
        for model, text in expected.items():
            assert said(serving, model) == text
    # There is room for one at a time: each took the other's place.
    assert adapter_counts(serving) == [2, 1, 1, 4]
    assert serving.post(UNLOAD, json={"lora_name": "sql"}).is_success
    assert adapter_counts(serving)[0] == 1
    refused = serving.post("/v1/completions", json={**ASK, "model": "sql"})
    assert refused.status_code == 404


@pytest.mark.parametrize(
    ("path", "message"),
    [("large", "--max_lora_rank"), ("broken", "not valid JSON"), ("team", "neither")],
)
def test_a_load_that_fails_loses_nothing(
    serving: httpx.Client, expected: dict[str, str], path: str, message: str
) -> None:
    body = {**ASK, "model": "chat", "stream": True, "max_tokens": 200}
    with serving.stream("POST", "/v1/completions", json=body) as running_answer:
        lines = running_answer.iter_lines()
        next(lines)
        answer = load(serving, "a", path)
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]
        *_, last = filter(None, lines)
        assert last == "data: [DONE]"
    assert said(serving, "chat") == expected["chat"]


def test_what_runs_goes_on_when_its_adapter_is_unloaded(model: Path, root: Path) -> None:
    modules = (f"sql={root / 'sql'}",)
    alone = LLM(config(model, lora_modules=modules))
    wanted: RequestOutput = alone.generate([PROMPT], replace(LONG, adapter="sql"))[0]
    settings = config(model, lora_modules=modules, allow_adapter_updates=True, max_loras=1)
    with running(settings) as engine:
        client = engine.client

        async def main() -> None:
            await client.ready()
            params: SamplingParams = replace(LONG, adapter="sql")
            answer = client.add(PROMPT, params, streamed=True)
            pieces = await answer.__anext__()
            await client.unload_adapter("sql")
            with pytest.raises(UserError, match=r"adapter is 'sql' \(loaded: none\)"):
                await all_pieces(client, PROMPT, params)
            await client.load_adapter("sql", str(root / "team" / "chat"))  # another one
            other = await all_pieces(client, PROMPT, params)
            async for more in answer:
                pieces += more
            assert texts(pieces) == [wanted.text]
            assert texts(other) != [wanted.text]
            with pytest.raises(UserError, match="is loaded already"):
                await client.load_adapter("sql", str(root / "sql"))
            stats = await nothing_runs(client)
            assert (stats.num_adapters, stats.num_adapters_written) == (1, 2)

        engine.run(main())
