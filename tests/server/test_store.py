"""Responses that are kept: within bounds, apart by key, and made while nobody waits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from predict.request import SamplingParams
from predict.server.errors import ApiError
from predict.server.store import ENTRY_BYTES, Entry, Store
from tests.server.conftest import TEMPLATE
from tests.support.http_server import SECONDS, ScriptedServer, config_of
from tests.support.tiny import TOKENIZER

RESPONSES = "/v1/responses"


def entry(owner: bytes, number: int, size: int, is_running: bool = False) -> Entry:
    response = json.dumps({"output": [{"text": "x" * size}]}).encode()
    made = Entry(owner, f"resp_{number}", response, b"[]", [] if is_running else None)
    if is_running:
        made.task = SimpleNamespace(done=made.gone.is_set)  # type: ignore[assignment]
    return made


SLOW = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4)]


@pytest.mark.parametrize("seed", [0, *SLOW])
def test_10000_random_changes_stay_within_the_bounds(seed: int) -> None:
    draw = random.Random(seed)
    max_count, max_bytes = draw.choice([(8, 1 << 14), (64, 1 << 15), (3, 1 << 20)])
    store = Store(max_count, max_bytes)
    known: dict[tuple[bytes, str], Entry] = {}
    running: list[Entry] = []
    for number in range(10_000):
        owner = draw.choice([b"a", b"b", b""])
        action = draw.random()
        if action < 0.5:
            made = entry(owner, number, draw.randrange(0, 4000), draw.random() < 0.1)
            if store.put(made):
                known[owner, made.id] = made
                running += [made] if made.is_running else []
        elif action < 0.7 and known:
            key, made = draw.choice(list(known.items()))
            with contextlib.suppress(ApiError):
                assert store.find(*key) is made
            for other in {b"a", b"b", b""} - {key[0]}:
                with pytest.raises(ApiError) as gone:
                    store.find(other, key[1])
                assert gone.value.status == 404
        elif action < 0.8 and known:
            key, made = draw.choice(list(known.items()))
            store.remove(known.pop(key))
            with pytest.raises(ApiError):
                store.find(*key)
        elif running:
            made = draw.choice(running)
            if draw.random() < 0.5:
                running.remove(made)
                made.task = None
            else:
                assert made.events is not None
                made.events.append(b"e" * draw.randrange(2000))
                store.measure(made, made.events[-1])
        assert len(store) <= max_count
        kept = list(store)
        assert store.num_bytes == sum(each.size for each in kept) <= max_bytes
        for each in kept:
            assert each.size >= ENTRY_BYTES + len(each.response) + sum(map(len, each.events or ()))
        # What runs gives way to nothing but itself: it is ended then.
        left = {id(each) for each in kept}
        assert all(id(each) in left or each.gone.is_set() for each in running)
        running = [each for each in running if id(each) in left]


def test_what_entries_take_is_counted() -> None:
    def keep(number: int, num_events: int) -> None:
        response = json.dumps({"output": [], "id": number}).encode()
        events: list[bytes] = []
        made = Entry(b"", f"resp_{number:048}", response, b"[%d]" % number, events)
        store.put(made)
        for event in range(num_events):
            events.append(b"event: x\ndata: %d\n\n" % event)
            store.measure(made, events[-1])

    for num_events in (0, 50):
        store = Store(1000, 1 << 30)
        tracemalloc.start()
        for number in range(100):
            keep(number, num_events)
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken <= store.num_bytes


def test_what_was_asked_for_least_lately_goes_first() -> None:
    store = Store(2, 1 << 20)
    for number in (0, 1):
        assert store.put(entry(b"", number, 1))
    store.find(b"", "resp_0")
    assert store.put(entry(b"", 2, 1))
    assert [each.id for each in store] == ["resp_0", "resp_2"]
    assert not store.put(entry(b"", 3, 2 << 20)), "larger than all"
    assert not Store(0, 1 << 20).put(entry(b"", 0, 1))


def script(prompt: str, params: SamplingParams) -> list[str]:
    return ["one", " two", " three"]


@contextlib.contextmanager
def serving(**changes: Any) -> Iterator[tuple[ScriptedServer, httpx.Client]]:
    config = config_of(TOKENIZER, TEMPLATE, **changes)
    with ScriptedServer(config, script) as server, httpx.Client(base_url=server.url) as client:
        client.timeout = SECONDS
        yield server, client


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with serving() as (_, client):
        yield client


def created(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(RESPONSES, json={"input": "count", **fields})
    assert response.status_code == 200, response.text
    made: dict[str, Any] = response.json()
    return made


def ended(client: httpx.Client, response_id: str) -> dict[str, Any]:
    """A background response once it has ended."""
    while True:
        made: dict[str, Any] = client.get(f"{RESPONSES}/{response_id}").json()
        if made["status"] not in ("queued", "in_progress"):
            return made


def text_of(response: dict[str, Any]) -> str:
    text: str = response["output"][-1]["content"][0]["text"]
    return text


def test_a_response_is_kept_until_it_is_deleted(client: httpx.Client) -> None:
    made = created(client)
    path = f"{RESPONSES}/{made['id']}"
    assert client.get(path).json() == made
    assert (made["status"], made["store"], text_of(made)) == ("completed", True, "one two three")
    deleted = client.delete(path).json()
    assert deleted == {"id": made["id"], "object": "response", "deleted": True}
    for response in (client.get(path), client.delete(path), client.post(f"{path}/cancel")):
        assert response.status_code == 404
        assert response.json()["error"]["param"] == "response_id"
    gone = client.post(RESPONSES, json={"input": "x", "previous_response_id": made["id"]})
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "previous_response_id")
    unkept = created(client, store=False)
    assert client.get(f"{RESPONSES}/{unkept['id']}").status_code == 404


def test_a_streamed_response_is_kept_as_its_last_event_has_it(client: httpx.Client) -> None:
    events = client.post(RESPONSES, json={"input": "x", "stream": True}).text.split("\n\n")
    made = json.loads(events[-2].partition("data: ")[2])["response"]
    assert client.get(f"{RESPONSES}/{made['id']}").json() == made


def test_input_items_are_those_of_the_whole_conversation(client: httpx.Client) -> None:
    first = created(client, input=[{"role": "user", "content": "a"}])
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "b"}
    second = created(client, input=[call, result], previous_response_id=first["id"])
    path = f"{RESPONSES}/{second['id']}/input_items"
    whole = client.get(path, params={"order": "asc"}).json()
    assert [item["type"] for item in whole["data"]] == [
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    assert whole["data"][0]["content"] == [{"type": "input_text", "text": "a"}]
    assert whole["data"][1] == first["output"][0]
    ids = [item["id"] for item in whole["data"]]
    assert (whole["first_id"], whole["last_id"], whole["has_more"]) == (ids[0], ids[-1], False)
    page = client.get(path, params={"limit": 1}).json()
    assert ([item["id"] for item in page["data"]], page["has_more"]) == (ids[3:], True)
    rest = client.get(path, params={"after": ids[3]}).json()
    assert [item["id"] for item in rest["data"]] == ids[2::-1]
    for name, value in (("limit", "0"), ("limit", "x"), ("order", "up"), ("after", "nobody")):
        response = client.get(path, params={name: value})
        assert (response.status_code, response.json()["error"]["param"]) == (400, name)


def test_responses_are_apart_by_key() -> None:
    with serving(api_keys=("a", "b")) as (_, client):
        client.headers["Authorization"] = "Bearer a"
        made = created(client)
        path = f"{RESPONSES}/{made['id']}"
        for headers in ({"Authorization": "Bearer b"}, {"X-Api-Key": "b"}):
            with httpx.Client(base_url=client.base_url, headers=headers) as other:
                for response in (
                    other.get(path),
                    other.delete(path),
                    other.post(f"{path}/cancel"),
                    other.get(f"{path}/input_items"),
                    other.post(RESPONSES, json={"input": "x", "previous_response_id": made["id"]}),
                ):
                    assert response.status_code == 404
        assert client.get(path).json() == made
        same = {"X-Api-Key": "a"}
        assert httpx.get(f"{client.base_url}{path}", headers=same).json() == made


def test_a_background_response_is_made_while_nobody_waits(client: httpx.Client) -> None:
    made = created(client, background=True)
    assert (made["status"], made["output"]) == ("queued", [])
    done = ended(client, made["id"])
    assert (done["status"], text_of(done)) == ("completed", "one two three")
    path = f"{RESPONSES}/{made['id']}"
    assert client.post(f"{path}/cancel").json() == done, "it has ended"
    response = client.get(path, params={"stream": "true"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream")
    response = client.post(f"{RESPONSES}/{created(client)['id']}/cancel")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "response_id")


def test_a_background_stream_goes_on_without_its_client_and_is_told_again() -> None:
    with serving() as (server, client):
        server.engine.is_held = True
        body = {"input": "x", "background": True, "stream": True}
        with client.stream("POST", RESPONSES, json=body) as stream:
            server.wait_until(lambda: server.engine.num_added == 1)
            server.call(server.engine.release)
            first = next(stream.iter_text())
        made = json.loads(first.partition("data: ")[2].partition("\n")[0])["response"]
        assert made["status"] == "queued"
        done = ended(client, made["id"])
        assert text_of(done) == "one two three"
        path = f"{RESPONSES}/{made['id']}"
        events = client.get(path, params={"stream": "true"}).text.split("\n\n")[:-1]
        values = [json.loads(event.partition("data: ")[2]) for event in events]
        assert [each["sequence_number"] for each in values] == list(range(len(values)))
        assert values[-1]["response"] == done
        later = client.get(path, params={"stream": "true", "starting_after": 3}).text
        assert later.split("\n\n")[:-1] == events[4:]


def test_a_client_that_does_not_read_a_background_stream_is_given_up() -> None:
    with serving(request_timeout=1.0) as (server, client):
        server.engine.script = lambda prompt, params: ["x" * 100_000] * 200
        body = json.dumps({"input": "x", "background": True, "stream": True}).encode()
        head = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with server.connect() as sock:
            sock.sendall(f"POST {RESPONSES} HTTP/1.1\r\n{head}".encode() + body)
            server.wait_until(lambda: server.engine.num_added == 1)
            server.wait_until(lambda: server.lifecycle.num_requests == 0)
        server.engine.script = script
        assert text_of(created(client)) == "one two three"


@pytest.mark.parametrize("way", ["cancel", "delete"])
def test_a_background_response_is_ended(way: str) -> None:
    with serving() as (server, client):
        server.engine.is_held = True
        made = created(client, background=True)
        server.wait_until(lambda: server.engine.num_added == 1)
        path = f"{RESPONSES}/{made['id']}"
        body = {"input": "x", "previous_response_id": made["id"]}
        assert client.post(RESPONSES, json=body).json()["error"]["param"] == "previous_response_id"
        if way == "cancel":
            assert client.post(f"{path}/cancel").json()["status"] == "cancelled"
            assert client.get(path).json()["status"] == "cancelled"
        else:
            client.delete(path)
        server.wait_until(lambda: server.engine.num_in_flight == 0)
        server.wait_until(lambda: server.lifecycle.num_requests == 0)


def test_background_responses_are_finished_while_the_server_drains_and_fail_as_others() -> None:
    with serving(request_timeout=0.3) as (server, client):
        server.engine.is_held = True
        made = created(client, background=True)
        server.wait_until(lambda: server.engine.num_added == 1)
        assert server.lifecycle.num_requests == 1
        done = ended(client, made["id"])
        assert (done["status"], done["error"]["code"]) == ("failed", "server_error")
        assert "0.3 s" in done["error"]["message"]


def test_what_has_failed_or_no_item_may_be_does_not_go_on() -> None:
    with serving() as (server, client):
        server.engine.failed = [0]
        failed = ended(client, created(client, background=True)["id"])
        server.engine.failed = []
        assert failed["status"] == "failed"
        call = json.dumps({"name": "n" * 300, "arguments": {}})
        server.engine.script = lambda *_: [f"<tool_call>\n{call}\n</tool_call>"]
        named = created(client, tools=[{"type": "function", "name": "f"}])
        assert named["output"][0]["type"] == "function_call"
        for made in (failed, named):
            body = {"input": "x", "previous_response_id": made["id"]}
            error = client.post(RESPONSES, json=body).json()["error"]
            assert error["param"] == "previous_response_id"
            assert made["id"] in error["message"]


def test_a_full_store_takes_no_background_response() -> None:
    with serving(max_stored_responses=1) as (server, client):
        server.engine.is_held = True
        created(client, background=True)
        full = client.post(RESPONSES, json={"input": "x", "background": True})
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        server.call(server.engine.release)
    with serving(max_stored_responses=0) as (_, client):
        assert created(client)["store"] is False
        for field in ("store", "background"):
            response = client.post(RESPONSES, json={"input": "x", field: True})
            assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_early_turns_give_way_where_they_may() -> None:
    turns = [{"role": "user", "content": f"{i} " + "word " * 12} for i in range(12)]
    body = {"input": [{"role": "system", "content": "Be brief."}, *turns]}
    with serving() as (server, client):
        refused = client.post(RESPONSES, json=body).json()["error"]
        assert (refused["param"], refused["code"]) == ("input", "context_length_exceeded")
        created(client, **body, truncation="auto", max_output_tokens=100)
        prompt = server.engine.tokenizer.decode(server.engine.added[-1][0], False)
        assert prompt.startswith("[system]Be brief.[user]")
        assert "[user]11 word" in prompt
        assert "[user]0 word" not in prompt
        assert 100 <= len(server.engine.added[-1][0]) <= 156
        long = {"role": "user", "content": "word " * 300}
        refused = client.post(RESPONSES, json={"input": [long], "truncation": "auto"}).json()
        assert refused["error"]["param"] == "input"


def test_follow_ends_with_its_entry() -> None:
    async def run() -> list[bytes]:
        store, made = Store(4, 1 << 20), entry(b"", 0, 1)
        made.events = [b"a"]

        async def work() -> None:
            await asyncio.sleep(0)
            assert made.events is not None
            made.events.append(b"b")
            store.measure(made, b"b")

        store.put(made)
        made.task = asyncio.create_task(work())
        made.task.add_done_callback(lambda _: made.moved.set())
        return [event async for event in made.follow(0)]

    assert asyncio.run(run()) == [b"a", b"b"]
