"""Sleep, wake-up and updates over HTTP, and an engine that is killed in the middle of one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from predict.config.rest import Rest
from predict.errors import UserError
from predict.request import SamplingParams
from predict.server.engine_client import EngineDied
from predict.server.key_file import read_keys
from tests.server.engines import GREEDY, all_pieces, config, running
from tests.support import tiny
from tests.support.http_server import SECONDS, ModelServer, ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

WEIGHTS = "model.safetensors"
SHAPE = {"vocab_size": 342, "eos_token_id": 1}


def digests(folder: Path) -> dict[str, str]:
    return {WEIGHTS: hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("weights")
    tiny.write(root / "step-2", SHAPE, seed=2)
    return root


@pytest.fixture(scope="module")
def served(model: Path, root: Path) -> Iterator[httpx.Client]:
    changes: dict[str, Any] = {"enable_sleep_mode": True, "weights_root": str(root)}
    with (
        ModelServer(config_of(model, **changes)) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        yield client


def text(client: httpx.Client) -> str:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: str = response.json()["choices"][0]["text"]
    return found


def said(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["message"]


def test_a_model_sleeps_and_wakes(served: httpx.Client) -> None:
    before = text(served)
    for level in (1, 2):
        assert served.post(f"/sleep?level={level}").json() == {"is_sleeping": True}
        assert served.get("/is_sleeping").json() == {"is_sleeping": True}
        status, why = said(served.post("/v1/completions", json={"prompt": "x"}))
        assert (status, "/wake_up" in why) == (503, True)
        assert served.get("/ready").status_code == 503
        assert served.get("/health").status_code == 200
        assert said(served.post("/sleep"))[0] == 409
        assert served.post("/wake_up").json() == {"is_sleeping": False}
        assert text(served) == before
    assert said(served.post("/wake_up"))[0] == 409
    assert said(served.post("/sleep?level=3"))[0] == 400
    assert said(served.post("/sleep?mode=keep"))[0] == 400


def test_weights_come_from_below_the_root_with_their_digests(
    served: httpx.Client, model: Path, root: Path
) -> None:
    before, new = text(served), root / "step-2"

    def update(**body: Any) -> httpx.Response:
        return served.post("/update_weights", json=body)

    for body, status, why in (
        ({"path": "step-2"}, 400, "digests"),
        ({"path": "step-2", "digests": {WEIGHTS: "0" * 64}}, 400, "has the SHA-256"),
        ({"path": "step-2", "digests": {}}, 400, "digests"),
        ({"path": str(model), "digests": digests(model)}, 403, "--weights_root"),
        ({"path": "step-3", "digests": digests(new)}, 404, "step-3"),
        ({"path": "step-2", "digests": digests(new), "mode": "keep"}, 400, "mode"),
    ):
        response = update(**body)
        assert response.status_code == status, response.text
        assert why in response.text
        assert str(root) not in response.text
        assert text(served) == before
    assert update(path="step-2", digests=digests(new)).json() == {"is_sleeping": False}
    assert text(served) != before


def test_nothing_of_it_is_there_unless_it_is_allowed(tmp_path: Path) -> None:
    keys = [{"name": "a", "key": "a", "admin": True}, {"name": "b", "key": "b"}]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"keys": keys}))
    assert [key.admin for key in read_keys(file)] == [True, False]
    update = {"path": "x", "digests": {"x": "0" * 64}}
    asks: list[tuple[str, Any]] = [
        ("/sleep", None),
        ("/wake_up", None),
        ("/update_weights", update),
    ]
    allowed: dict[str, Any] = {"enable_sleep_mode": True, "weights_root": "."}
    cases: list[tuple[dict[str, Any], str]] = [({}, "a"), (allowed, "b")]
    for changes, key in cases:
        served_by = config_of(TOKENIZER, api_key_file=str(file), **changes)
        with ScriptedServer(served_by, lambda *_: ["a"]) as server:
            for path, body in asks:
                headers = {"Authorization": f"Bearer {key}"}
                response = httpx.post(server.url + path, json=body, headers=headers)
                assert response.status_code == 403, path


DIES = """
import os, signal, sys
from predict.engine.runner.residence import Residence
from predict.server.engine_process import main
Residence.come_back = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sys.exit(main(sys.argv[1:]))
"""


def test_a_kill_in_the_middle_leaves_the_old_or_the_new(model: Path, root: Path) -> None:
    """When the old weights have left and the new ones are read. The front hears of it.

    Whoever starts the engine anew has whole weights: the old ones, since files never change.
    """
    folder = root / "step-2"
    files = {path: path.read_bytes() for each in (model, folder) for path in each.glob("*")}
    rest = Rest("update_weights", path=str(folder), digests=digests(folder))
    with running(config(model), DIES) as engine:
        engine.run(engine.client.ready())
        old = engine.run(all_pieces(engine.client, [5, 6, 7], GREEDY))
        with pytest.raises(EngineDied):
            engine.run(engine.client.rest(rest))
        assert "signal 9" in engine.run(engine.client.last_words())
    assert {path: path.read_bytes() for path in files} == files
    with running(config(model)) as engine:
        engine.run(engine.client.ready())
        assert engine.run(all_pieces(engine.client, [5, 6, 7], GREEDY)) == old
        engine.run(engine.client.rest(rest))
        assert engine.run(all_pieces(engine.client, [5, 6, 7], GREEDY)) != old


def test_what_was_asked_as_the_model_went_to_sleep_is_to_come_again() -> None:
    def script(prompt: str, params: SamplingParams) -> Exception:
        server.engine.is_sleeping = True
        return UserError("the model sleeps; wake it up first")

    with ScriptedServer(config_of(TOKENIZER), script) as server:
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
        assert response.status_code == 503, response.text
        assert "Retry-After" in response.headers
