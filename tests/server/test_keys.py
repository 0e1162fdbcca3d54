"""Keys of a file: their limits, their names in the log, and a file that changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from predict.errors import UserError
from predict.request import SamplingParams
from predict.server.auth import Keys
from predict.server.key_file import read_keys
from tests.support.http_server import SECONDS, ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

TEMPLATE = Path(__file__).parent / "templates" / "tools.jinja"
ASK = {"prompt": "count", "max_tokens": 8}


def write(file: Path, *keys: Any) -> Path:
    file.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    return file


@contextlib.contextmanager
def serving(file: Path) -> Iterator[tuple[ScriptedServer, httpx.Client]]:
    def script(prompt: str, params: SamplingParams) -> tuple[str, ...]:
        return ("one", " two")

    config = config_of(TOKENIZER, TEMPLATE, api_key_file=str(file))
    with ScriptedServer(config, script) as server, httpx.Client(base_url=server.url) as client:
        client.timeout = SECONDS
        yield server, client


def ask(client: httpx.Client, key: str, header: str | None = None, **body: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    if header is not None:
        headers["X-Priority"] = header
    return client.post("/v1/completions", json={**ASK, **body}, headers=headers)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "0 keys"),
        (["k"], r"keys\[0\] is a text"),
        ([{"name": "a", "key": "k", "max_qeue": 3}], "max_qeue.*max_queue"),
        ([{"name": "a"}], "either key, or the sha256"),
        ([{"name": "a", "key": "k", "sha256": "0" * 64}], "either key, or the sha256"),
        ([{"name": "a", "sha256": "0"}], "64 hexadecimal"),
        ([{"name": "a", "key": "a b"}], "visible ASCII"),
        ([{"name": "", "key": "k"}], "1 to 64 visible"),
        ([{"name": "a", "key": "k", "max_queue": 0}], "max_queue"),
        ([{"name": "a", "key": "k", "min_priority": "low"}], "min_priority"),
        ([{"name": "a", "key": "k"}, {"name": "b", "key": "k"}], r"keys\[1\] has the key"),
        ([{"name": "a", "key": "k"}, {"name": "a", "key": "l"}], r"keys\[1\] has the name"),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_field(tmp_path: Path, keys: Any, said: str) -> None:
    file = write(tmp_path / "keys.json", *keys)
    with pytest.raises(UserError, match=said) as error:
        config_of(TOKENIZER, api_key_file=str(file))
    assert "'k'" not in str(error.value)


def test_a_file_is_read_again_when_it_changes_and_a_wrong_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "keys.json", {"name": "old", "key": "old-key"})
    now = 0.0
    keys = Keys(("given",), str(file), lambda: now)

    def name(key: str) -> str | None:
        with contextlib.suppress(Exception):
            return keys.check("/v1/models", f"Bearer {key}".encode(), None).name
        return None

    digest = hashlib.sha256(b"new-key").hexdigest()
    new = write(tmp_path / "new.json", {"name": "new", "sha256": digest, "max_queue": 2})
    assert (name("old-key"), name("new-key"), name("given")) == ("old", None, "")
    os.replace(new, file)
    assert name("new-key") is None, "it is looked at once a second"
    now += 1.0
    assert (name("old-key"), name("new-key"), name("given")) == (None, "new", "")
    file.write_text("{", encoding="utf-8")
    now += 1.0
    assert name("new-key") == "new"
    assert "stay as they were" in caplog.text
    assert read_keys(write(file, {"name": "n", "sha256": digest}))[0].digest.hex() == digest


def test_a_key_has_its_own_queue_and_its_name_in_the_log(tmp_path: Path) -> None:
    file = write(
        tmp_path / "keys.json",
        {"name": "small", "key": "s", "max_queue": 2},
        {"name": "large", "key": "l"},
    )
    with serving(file) as (server, client):
        refused = ask(client, "s", n=3, temperature=1.0)
        assert refused.status_code == 429
        assert "allowed: 2" in refused.json()["error"]["message"]
        server.engine.is_held = True
        held = threading.Thread(target=ask, args=(client, "s"), kwargs={"n": 2, "temperature": 1.0})
        held.start()
        server.wait_until(lambda: len(server.engine.answers) == 1)
        assert ask(client, "s").status_code == 429
        server.call(server.engine.release)
        assert ask(client, "l").status_code == 200, "another key's queue has room"
        held.join(SECONDS)
        server.wait_until(lambda: server.engine.num_in_flight == 0)
        assert ask(client, "s").status_code == 200
        assert ask(client, "x").status_code == 401
    lines = [json.loads(line) for line in server.lines]
    assert [line.get("key") for line in lines].count("small") == 4
    assert not any('"s"' in line or '"l"' in line for line in server.lines)


def test_priorities_come_by_body_or_header_within_what_a_key_may_ask(tmp_path: Path) -> None:
    file = write(
        tmp_path / "keys.json",
        {"name": "any", "key": "any"},
        {"name": "late", "key": "late", "min_priority": 5},
    )
    with serving(file) as (server, client):

        def ran(key: str, header: str | None = None, **body: Any) -> int | str:
            response = ask(client, key, header, **body)
            if response.status_code != 200:
                error: dict[str, str] = response.json()["error"]
                return f"{response.status_code} {error['param']}"
            return server.engine.added[-1][1].priority

        assert ran("any") == 0
        assert ran("any", priority=-3) == -3
        assert ran("any", "7", priority=-3) == 7
        assert ran("late") == 5
        assert ran("late", "9") == 9
        assert ran("late", priority=4) == "400 priority"
        assert ran("late", "-1") == "400 X-Priority"
        assert ran("any", "soon") == "400 X-Priority"
        assert ran("any", "99999999999") == "400 X-Priority"
        assert ran("any", priority=1.5) == "400 priority"


def test_an_answer_in_the_background_has_the_limits_of_its_key(tmp_path: Path) -> None:
    limits = {"max_queue": 1, "min_priority": 3}
    file = write(tmp_path / "keys.json", {"name": "late", "key": "late", **limits})
    with serving(file) as (server, client):
        server.engine.is_held = True
        headers = {"Authorization": "Bearer late"}
        body = {"model": "test", "input": "x", "background": True}
        asked = client.post("/v1/responses", json=body, headers=headers)
        assert asked.status_code == 200, asked.text
        server.wait_until(lambda: len(server.engine.answers) == 1)
        assert server.engine.added[-1][1].priority == 3
        assert ask(client, "late").status_code == 429
        server.call(server.engine.release)
        server.wait_until(lambda: server.engine.num_in_flight == 0)
        server.wait_until(lambda: server.lifecycle.num_requests == 0)
        assert ask(client, "late").status_code == 200
