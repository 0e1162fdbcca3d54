"""The doors of vectors and scores: over HTTP as from LLM, hostile bodies, and a storm."""

from __future__ import annotations

import asyncio
import base64
import random
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import httpx
import numpy as np
import pytest

from predict.config.engine import EngineConfig
from predict.engine.embedding import Text
from predict.engine.retrieval import Writer
from predict.server.config import ServerConfig
from tests.support.http_server import SECONDS, ModelServer
from tests.support.vectors import FOLDER, FOUND, IDS, SAID, llm_of

TEXTS = SAID["texts"]
QUERY, DOCUMENTS = SAID["pairs"][0][0], [pair[1] for pair in SAID["pairs"]]


def config_of(case: str, **settings: Any) -> ServerConfig:
    given = {"max_length": 512, "batch_size": 8, "attention": "append", **settings}
    return ServerConfig(engine=EngineConfig(model_name_or_path=str(FOLDER / case), **given))


@pytest.fixture(scope="module")
def server() -> Iterator[ModelServer]:
    with ModelServer(config_of("qwen3_embedding")) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: ModelServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=SECONDS) as client:
        yield client


@pytest.fixture(scope="module")
def reranker() -> Iterator[httpx.Client]:
    with (
        ModelServer(config_of("bert_reranker")) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        yield client


def vectors(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return np.array([each["embedding"] for each in answer.json()["data"]], np.float32)


def test_vectors_over_http_are_those_of_the_llm(client: httpx.Client) -> None:
    wanted = llm_of("qwen3_embedding").embed([*TEXTS, *IDS])
    answer = client.post("/v1/embeddings", json={"input": TEXTS})
    np.testing.assert_allclose(vectors(answer), wanted[:4], atol=1e-6, rtol=0)
    counts = sum(map(len, SAID["tokens"]["qwen3_embedding"]["texts"]))
    assert answer.json()["usage"] == {"prompt_tokens": counts, "total_tokens": counts}
    by_ids = client.post("/v1/embeddings", json={"input": IDS})
    np.testing.assert_allclose(vectors(by_ids), wanted[4:], atol=1e-6, rtol=0)
    one = client.post("/v1/embeddings", json={"input": IDS[2]})
    np.testing.assert_allclose(vectors(one), wanted[6:7], atol=1e-6, rtol=0)


def test_vectors_come_as_base64_shortened_and_behind_prompts(client: httpx.Client) -> None:
    llm = llm_of("qwen3_embedding")
    body = {"input": "cats", "encoding_format": "base64", "dimensions": 8, "prompt_name": "query"}
    (entry,) = client.post("/v1/embeddings", json=body).json()["data"]
    found = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    wanted = llm.embed("cats", dimensions=8, prompt_name="query")[0]
    np.testing.assert_allclose(found, wanted, atol=1e-6, rtol=0)
    cut = client.post("/v1/embeddings", json={"input": IDS[-1], "truncate_prompt_tokens": 33})
    np.testing.assert_allclose(vectors(cut)[0], llm.embed([IDS[-1][:33]])[0], atol=1e-6, rtol=0)
    long = client.post("/v1/embeddings", json={"input": "cats " * 600})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    whole = client.post(
        "/v1/embeddings", json={"input": "cats " * 600, "truncate_prompt_tokens": -1}
    )
    assert whole.json()["usage"]["prompt_tokens"] == 512


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
def test_documents_are_ranked_by_a_head(reranker: httpx.Client, path: str) -> None:
    wanted = FOUND["bert_reranker/score"]
    body = {"query": QUERY, "documents": [DOCUMENTS[0], *({"text": d} for d in DOCUMENTS[1:])]}
    results = reranker.post(path, json=body).json()["results"]
    assert [each["index"] for each in results] == np.argsort(-wanted, kind="stable").tolist()
    for each in results:
        assert abs(each["relevance_score"] - wanted[each["index"]]) < 1e-4
        assert each["document"] == {"text": DOCUMENTS[each["index"]]}
    short = reranker.post(path, json={**body, "top_n": 2, "return_documents": False}).json()
    assert short["results"] == [
        {name: each[name] for name in ("index", "relevance_score")} for each in results[:2]
    ]


def test_pairs_are_scored(reranker: httpx.Client, client: httpx.Client) -> None:
    body = {"text_1": QUERY, "text_2": DOCUMENTS}
    answer = reranker.post("/v1/score", json=body).json()
    found = [each["score"] for each in answer["data"]]
    np.testing.assert_allclose(found, FOUND["bert_reranker/score"], atol=1e-4, rtol=0)
    of_vectors = client.post("/v1/score", json=body).json()["data"]
    wanted = llm_of("qwen3_embedding").score(QUERY, DOCUMENTS)
    np.testing.assert_allclose([e["score"] for e in of_vectors], wanted, atol=1e-6, rtol=0)
    several = reranker.post("/v1/score", json={"text_1": DOCUMENTS, "text_2": DOCUMENTS})
    assert len(several.json()["data"]) == len(DOCUMENTS)


def test_a_model_says_by_name_what_it_cannot_make(reranker: httpx.Client) -> None:
    answer = reranker.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 400
    assert "pooling is not known" in answer.json()["error"]["message"]
    turn: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}]}
    doors: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/chat/completions": turn,
        "/v1/messages": {**turn, "max_tokens": 4},
        "/v1/responses": {"input": "a"},
    }
    for path, body in doors.items():
        for stream in (False, True):
            answer = reranker.post(path, json={**body, "stream": stream})
            assert answer.status_code == 400
            assert "makes vectors and scores, and no text" in answer.json()["error"]["message"]


def test_a_client_that_goes_while_its_texts_are_cut_is_waited_for_no_longer(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = []

    def slow(self: Writer, text: str, *_: Any, **__: Any) -> Text:
        cut.append(text)
        time.sleep(0.05)
        return Text([5])

    monkeypatch.setattr(Writer, "text", slow)
    body = {"input": ["a"] * 100}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/embeddings", json=body, timeout=0.3)
    server.wait_until(lambda: server.lifecycle.num_requests == 0)
    assert len(cut) < 50


def test_more_texts_than_may_wait_are_refused_as_texts() -> None:
    engine = config_of("qwen3_embedding").engine
    with (
        ModelServer(ServerConfig(engine=engine, max_queue=10)) as server,
        httpx.Client(base_url=server.url, timeout=SECONDS) as client,
    ):
        documents = [f"b {number}" for number in range(18)]
        many = client.post("/v1/rerank", json={"query": "a", "documents": documents})
        assert (many.status_code, many.json()["error"]["param"]) == (400, "input")
        assert "makes 19 texts (allowed: 18)" in many.json()["error"]["message"]
        few = client.post("/v1/rerank", json={"query": "a", "documents": documents[1:]})
        assert few.status_code == 200
        once = client.post("/v1/rerank", json={"query": "a", "documents": ["b"]}).json()
        again = client.post("/v1/rerank", json={"query": "a", "documents": ["b"] * 30}).json()
        assert len(again["results"]) == 30
        assert again["usage"] == once["usage"]


E, R, S = "/v1/embeddings", "/v1/rerank", "/v1/score"
ASK = {"query": "a", "documents": ["b"]}
BODIES: dict[str, tuple[str, Any, str]] = {
    "no input": (E, {}, "input"),
    "null": (E, {"input": None}, "input"),
    "a number": (E, {"input": 5}, "input"),
    "a boolean": (E, {"input": True}, "input"),
    "an object": (E, {"input": {"a": 1}}, "input"),
    "no texts": (E, {"input": []}, "input"),
    "an empty list within": (E, {"input": ["a", []]}, "input[1]"),
    "mixed": (E, {"input": ["a", {"b": 1}]}, "input[1]"),
    "null within": (E, {"input": ["a", None]}, "input[1]"),
    "a token below 0": (E, {"input": [5, -1]}, "input"),
    "a token of a larger vocabulary": (E, {"input": [5, 10**6]}, "input"),
    "a huge token": (E, {"input": [[5, 10**30]]}, "input"),
    "fractions": (E, {"input": [[1.5]]}, "input"),
    "a boolean among tokens": (E, {"input": [[5, True]]}, "input"),
    "deep lists": (E, {"input": [[[5]]]}, "input"),
    "too many texts": (E, {"input": ["a"] * 129}, "input"),
    "a long text": (E, {"input": "word " * 100_000}, "input"),
    "a long word": (E, {"input": "a" * 1_000_000}, "input"),
    "many tokens": (E, {"input": [5] * 513}, "input"),
    "dimensions 0": (E, {"input": "a", "dimensions": 0}, "dimensions"),
    "dimensions below 0": (E, {"input": "a", "dimensions": -1}, "dimensions"),
    "many dimensions": (E, {"input": "a", "dimensions": 33}, "dimensions"),
    "half a dimension": (E, {"input": "a", "dimensions": 1.5}, "dimensions"),
    "huge dimensions": (E, {"input": "a", "dimensions": 10**30}, "dimensions"),
    "a text as dimensions": (E, {"input": "a", "dimensions": "8"}, "dimensions"),
    "a list as dimensions": (E, {"input": "a", "dimensions": [8]}, "dimensions"),
    "another format": (E, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    "a number as format": (E, {"input": "a", "encoding_format": 1}, "encoding_format"),
    "an unknown prompt": (E, {"input": "a", "prompt_name": "title"}, "prompt_name"),
    "a number as prompt": (E, {"input": "a", "prompt_name": 3}, "prompt_name"),
    "cut to 0": (E, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    "cut below -1": (E, {"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    "cut beyond": (E, {"input": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens"),
    "a text as cut": (E, {"input": "a", "truncate_prompt_tokens": "x"}, "truncate_prompt_tokens"),
    "an unknown field": (E, {"input": "a", "dimension": 8}, "dimension"),
    "messages": (E, {"input": "a", "messages": []}, "messages"),
    "a length": (E, {"input": "a", "normalized": True}, "files say whether vectors have length"),
    "no token within": (E, {"input": ["a", []]}, "input[1] has no tokens"),
    "priority": (E, {"input": "a", "priority": 3}, "priority"),
    "task": (E, {"input": "a", "task": "x"}, "task"),
    "another model": (E, {"input": "a", "model": "other"}, "model"),
    "a number as model": (E, {"input": "a", "model": 1}, "model"),
    "a long model": (E, {"input": "a", "model": "m" * 5000}, "model"),
    "no query": (R, {"documents": ["a"]}, "query"),
    "a list as query": (R, {**ASK, "query": ["a"]}, "query"),
    "an object as query": (R, {**ASK, "query": {"image": "a"}}, "query"),
    "no documents": (R, {"query": "a"}, "documents"),
    "a text as documents": (R, {**ASK, "documents": "a"}, "documents"),
    "an empty list": (R, {**ASK, "documents": []}, "documents"),
    "too many documents": (R, {**ASK, "documents": ["a"] * 129}, "documents"),
    "a number within": (R, {**ASK, "documents": ["a", 5]}, "documents[1]"),
    "another object": (R, {**ASK, "documents": [{"text": "a", "title": "b"}]}, "documents[0]"),
    "no text": (R, {**ASK, "documents": [{"text": None}]}, "documents[0]"),
    "a long document": (R, {**ASK, "documents": ["b", "w " * 9000]}, "documents[1]"),
    "top 0": (R, {**ASK, "top_n": 0}, "top_n"),
    "top below 0": (R, {**ASK, "top_n": -1}, "top_n"),
    "a text as top": (R, {**ASK, "top_n": "3"}, "top_n"),
    "fields": (R, {**ASK, "rank_fields": ["a"]}, "rank_fields"),
    "a text as switch": (R, {**ASK, "return_documents": "no"}, "return_documents"),
    "an instruction": (R, {**ASK, "instruction": "a"}, "instruction"),
    "a cut of documents": (R, {**ASK, "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
    "two cuts": (
        *(R, {**ASK, "max_tokens_per_doc": 8, "truncate_prompt_tokens": 9}),
        "max_tokens_per_doc",
    ),
    "one text": (S, {"text_1": "a"}, "text_2"),
    "two for three": (S, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2"),
    "none": (S, {"text_1": [], "text_2": []}, "text_1"),
    "a number as text": (S, {"text_1": 5, "text_2": "a"}, "text_1"),
    "numbers within": (S, {"text_1": "a", "text_2": ["a", 5]}, "text_2"),
    "unknown": (S, {"text_1": "a", "text_2": "b", "text_3": "c"}, "text_3"),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused_where_it_is_wrong(client: httpx.Client, name: str) -> None:
    path, body, param = BODIES[name]
    answer = client.post(path, json=body)
    assert 400 <= answer.status_code < 500, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(param) or param in error["message"], error
    assert error["message"]


def test_the_server_goes_on_behind_hostile_bodies(
    client: httpx.Client, server: ModelServer
) -> None:
    assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 200
    stats = server.run(server.client.stats())
    assert stats.num_used_blocks == 0
    assert server.client.num_in_flight == 0


@pytest.mark.slow
def test_nothing_is_held_behind_a_storm_of_clients() -> None:
    draw = random.Random(5)
    doors: dict[str, dict[str, Any]] = {
        E: {"input": [*TEXTS, "the river " * 30]},
        R: {"query": QUERY, "documents": DOCUMENTS},
        S: {"text_1": QUERY, "text_2": DOCUMENTS},
        "/v1/completions": {"prompt": "the capital", "max_tokens": 8, "temperature": 0},
    }

    async def storm(url: str) -> list[int]:
        timeout, connector = aiohttp.ClientTimeout(SECONDS), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:

            async def ask(path: str, seconds: float | None) -> int:
                async def whole() -> int:
                    async with session.post(path, json=doors[path]) as response:
                        await response.read()
                        return response.status

                try:
                    return await asyncio.wait_for(whole(), seconds)
                except asyncio.TimeoutError:
                    return 0

            several = [
                ask(draw.choice([*doors]), None if number % 2 else draw.uniform(0.0, 0.5))
                for number in range(500)
            ]
            return list(await asyncio.gather(*several))

    with ModelServer(config_of("qwen3_embedding", max_length=256)) as server:
        statuses = asyncio.run(storm(server.url))
        server.wait_until(lambda: server.lifecycle.num_requests == 0)

        async def idle() -> Any:
            while True:
                stats = await server.client.stats()
                if not (stats.num_running or stats.num_waiting or stats.num_used_blocks):
                    return stats

        stats = server.run(asyncio.wait_for(idle(), SECONDS))
        assert set(statuses[1::2]) <= {200, 429}
        assert statuses.count(200) > 100
        assert stats.num_used_blocks == 0 < stats.num_cache_blocks
        assert server.client.num_in_flight == 0
