"""Vectors and scores against transformers: encoders, embedding models, rerankers."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams
from predict.engine.embedding import Text
from predict.engine.retrieval import Part
from predict.errors import EngineError, UserError
from predict.nn.pooling import normalized
from tests.support.adapters import write_seven
from tests.support.vectors import (
    CASES,
    ENCODERS,
    FOLDER,
    FOUND,
    IDS,
    OPERATORS,
    RERANKERS,
    SAID,
    llm_of,
    nothing_is_held,
    write_wide,
)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("operators", OPERATORS)
def test_pooled_hidden_states_equal_transformers(case: str, operators: str) -> None:
    llm = llm_of(case, operators)
    for pooling in ("mean", "cls", "last"):
        found = llm.embed(IDS, pooling, normalize=False)
        np.testing.assert_allclose(found, FOUND[f"{case}/{pooling}"], atol=1e-4, rtol=0)
    assert nothing_is_held(llm)


@pytest.mark.parametrize("case", ["bert", "modernbert", "embedding_gemma", "qwen3_embedding"])
def test_a_text_has_the_same_bits_alone_and_packed(case: str) -> None:
    llm = llm_of(case, max_num_batched_tokens=700, prefix_caching=False)
    together = llm.embed(IDS)
    alone = np.concatenate([llm.embed([ids]) for ids in IDS])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(llm.embed(IDS[::-1])[::-1], alone)


@pytest.mark.parametrize("case", RERANKERS)
def test_scores_and_their_order_equal_transformers(case: str) -> None:
    llm, wanted = llm_of(case), FOUND[f"{case}/score"]
    queries, documents = zip(*SAID["pairs"], strict=True)
    np.testing.assert_allclose(llm.score(queries, documents), wanted, atol=1e-4, rtol=0)
    ranked = llm.rerank(queries[0], documents, top_n=3)
    assert [each.index for each in ranked] == np.argsort(-wanted, kind="stable")[:3].tolist()
    assert nothing_is_held(llm)


def test_a_decoder_with_a_classification_head_scores_its_last_token() -> None:
    llm = llm_of("qwen3_classifier")
    pooler = llm.retrieval.score_pooler()
    found = llm.run_texts([Text(ids) for ids in IDS], pooler, None)[:, 0]
    np.testing.assert_allclose(found, FOUND["qwen3_classifier/score"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_texts_become_the_ids_that_transformers_makes(case: str) -> None:
    llm, wanted = llm_of(case), SAID["tokens"][case]
    writer = llm.retrieval.writer
    assert [list(writer.text(text).token_ids) for text in SAID["texts"]] == wanted["texts"]
    for (query, document), given in zip(SAID["pairs"], wanted.get("pairs", ()), strict=False):
        text = writer.part(Part(query, document))
        assert list(text.token_ids) == given["input_ids"]
        types = given.get("token_type_ids")
        if types and any(types):
            assert text.second == types.index(1)
        short = writer.part(Part(query, document), 20).token_ids if "qwen" not in case else ()
        assert len(short) <= 20


@pytest.mark.parametrize("case", ["bert_reranker", "xlm_roberta_reranker", "qwen3_reranker"])
def test_a_query_that_leaves_no_token_for_the_document_is_refused(case: str) -> None:
    llm = llm_of(case)
    writer = llm.retrieval.writer
    with pytest.raises(UserError, match=r"of 400 tokens .* leaves none for the second"):
        writer.part(Part("word " * 600, "another"), 400)
    assert len(writer.part(Part("word", "another " * 600), 400).token_ids) == 400


def with_values(case: str, name: str, folder: Path, **values: Any) -> Path:
    """A copy of a model with other values in one of its files."""
    shutil.copytree(FOLDER / case, folder)
    held = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps({**held, **values}))
    return folder


def test_a_score_of_vectors_is_what_the_files_name(tmp_path: Path) -> None:
    texts, name = SAID["texts"], "config_sentence_transformers.json"
    found = {}
    for similarity in ("dot", "cosine", "euclidean"):
        said = {"similarity_fn_name": similarity}
        folder = with_values("modernbert", name, tmp_path / similarity, **said)
        found[similarity] = LLM(folder, max_length=512, batch_size=8)
    plain = llm_of("modernbert")
    query = plain.embed(texts[0], prompt_name="query")
    documents = plain.embed(texts[1:], prompt_name="document")
    products = documents @ query[0]
    lengths = np.linalg.norm(query) * np.linalg.norm(documents, axis=1)
    dot, cosine = (found[each].score(texts[0], texts[1:]) for each in ("dot", "cosine"))
    np.testing.assert_allclose(dot, products, atol=1e-3, rtol=1e-4)
    np.testing.assert_allclose(cosine, products / lengths, atol=1e-5, rtol=0)
    assert np.abs(dot - cosine).max() > 0.1
    with pytest.raises(UserError, match=r"similarity_fn_name is euclidean .*: cosine, dot"):
        found["euclidean"].score(texts[0], texts[1:])
    np.testing.assert_array_equal(found["euclidean"].embed(IDS[:2]), plain.embed(IDS[:2]))


def test_a_text_that_stands_in_several_pairs_runs_once() -> None:
    llm = llm_of("qwen3_embedding", prefix_caching=False)
    texts = SAID["texts"]
    before = llm.engine.stats.num_scheduled_tokens
    found = llm.score(texts[0], [*texts[1:], texts[1]])
    ids = [llm.retrieval.writer.text(text).token_ids for text in texts[1:]]
    query = llm.retrieval.writer.text("query: " + texts[0]).token_ids
    num_tokens = len(query) + sum(map(len, ids))
    assert llm.engine.stats.num_scheduled_tokens - before == num_tokens
    assert found[0] == found[-1]
    alone = [llm.score(texts[0], text)[0] for text in texts[1:]]
    np.testing.assert_allclose(found[:-1], alone, atol=1e-6, rtol=0)


def test_files_say_pooling_dense_layers_and_length() -> None:
    raw = FOUND["embedding_gemma/mean"]
    llm = llm_of("embedding_gemma")
    files = llm.retrieval.files
    assert files.embed is not None
    (dense,) = files.embed.layers
    wanted = np.tanh(raw @ dense.weight.T + dense.bias)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    np.testing.assert_allclose(llm.embed(IDS), wanted, atol=1e-4, rtol=0)
    short = wanted[:, :8] / np.linalg.norm(wanted[:, :8], axis=1, keepdims=True)
    np.testing.assert_allclose(llm.embed(IDS, dimensions=8), short, atol=1e-4, rtol=0)
    query = llm.embed("cats", prompt_name="query")
    np.testing.assert_allclose(query, llm.embed("query: cats"), atol=1e-6, rtol=0)
    with pytest.raises(UserError, match=r"prompt_name is 'title' \(known: 'query', 'document'\)"):
        llm.embed("cats", prompt_name="title")


@pytest.mark.parametrize("case", ENCODERS)
def test_an_encoder_makes_no_text(case: str) -> None:
    with pytest.raises(UserError, match="makes vectors and scores, and no text"):
        llm_of(case).generate([[5, 6]])


def test_a_prompt_that_another_begins_with_is_read_from_the_cache() -> None:
    llm = llm_of("qwen3_embedding", block_size=32)
    long = IDS[-1]
    alone = llm_of("qwen3_embedding", block_size=32, prefix_caching=False).embed([long])
    llm.embed([long[:300]])
    before = llm.engine.stats.num_scheduled_tokens
    np.testing.assert_allclose(llm.embed([long]), alone, atol=1e-5)
    assert llm.engine.stats.num_scheduled_tokens - before == 512 - 288


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "no pooling": ("bert_reranker", {}, "pooling is not known: .* modules.json"),
    "a long text": ("bert", {"prompts": [IDS[-1] + [5]]}, "513 tokens"),
    "dimensions": ("bert", {"dimensions": 33}, r"dimensions is 33 \(allowed: 1 to 32"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(name: str) -> None:
    case, given, said = REFUSED[name]
    llm = llm_of(case)
    with pytest.raises(UserError, match=said):
        llm.embed(**{"prompts": [[5, 6]], **given})
    assert nothing_is_held(llm)


SCORED: dict[str, tuple[dict[str, Any], str]] = {
    "a number": ({"documents": 5}, r"documents is 5 \(allowed: a text, or a list of texts"),
    "bytes": ({"documents": b"a"}, "documents is b'a'"),
    "an object": ({"documents": {"text": "a"}}, "documents is {'text': 'a'}"),
    "a number within": ({"documents": ["a", 5]}, r"documents\[1\] is 5 \(allowed: a text\)"),
    "a document": ({"documents": [{"text": "a"}]}, r"documents\[0\] is"),
    "nothing": ({"documents": None}, "documents is None"),
    "no document": ({"documents": []}, "documents is empty"),
    "queries": ({"query": ["a"]}, "query is"),
    "no query": ({"query": None}, "query is None"),
    "an option": ({"instructions": "a"}, "'instructions' is no option .allowed: instruction, ad"),
    "an instruction": ({"instruction": 5}, "instruction is 5"),
    "an adapter": ({"adapter": ["a"]}, "adapter is"),
    "half a document": ({"top_n": 1.5}, "top_n is 1.5"),
}


@pytest.mark.parametrize("name", SCORED)
def test_a_pair_of_no_texts_is_refused_by_name(name: str) -> None:
    given, said = SCORED[name]
    with pytest.raises(UserError, match=said):
        llm_of("qwen3_reranker").rerank(**{"query": "a", "documents": ["b"], **given})


def test_a_flag_that_says_another_pooling_than_the_files_is_refused() -> None:
    with pytest.raises(UserError, match=r"--pooling last was given, .* names mean; leave the"):
        llm_of("embedding_gemma", pooling="last").embed([[5, 6]])
    same = llm_of("embedding_gemma", pooling="mean").embed([[5, 6]])
    np.testing.assert_array_equal(same, llm_of("embedding_gemma").embed([[5, 6]]))


@pytest.mark.parametrize("operators", OPERATORS)
@pytest.mark.parametrize(
    "case", ["bert_reranker", "modernbert", "embedding_gemma", "qwen3_embedding"]
)
def test_an_exported_program_gives_the_same(case: str, operators: str, tmp_path: Path) -> None:
    settings = {"max_length": 512, "batch_size": 8, **OPERATORS[operators]}
    config = EngineConfig(model_name_or_path=str(FOLDER / case), **settings)
    export_model(config, tmp_path / "static", task="embed")
    llm = LLM(tmp_path / "static", mode="static", max_length=512, batch_size=8)
    for pooling in ("mean", "last"):
        found = llm.embed(IDS, pooling, normalize=False)
        np.testing.assert_allclose(found, FOUND[f"{case}/{pooling}"], atol=1e-4, rtol=0)
    if case == "bert_reranker":
        queries, documents = zip(*SAID["pairs"], strict=True)
        found = llm.score(queries, documents)
        np.testing.assert_allclose(found, FOUND[f"{case}/score"], atol=1e-4, rtol=0)
    else:
        np.testing.assert_allclose(llm.embed(IDS), llm_of(case).embed(IDS), atol=1e-4, rtol=0)
    assert nothing_is_held(llm)


def test_an_exported_program_keeps_the_pooling_of_the_flag(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDER / "bert", tmp_path / "model")
    (folder / "modules.json").unlink()
    config = EngineConfig(model_name_or_path=str(folder), max_length=512, pooling="cls")
    export_model(config, tmp_path / "static")
    llm = LLM(tmp_path / "static", mode="static", max_length=512, batch_size=8)
    assert not llm.retrieval.says_nothing
    wanted = normalized(FOUND["bert/cls"])
    np.testing.assert_allclose(llm.embed(IDS), wanted, atol=1e-4, rtol=0)
    with pytest.raises(UserError, match=r"--pooling mean was given, .* names cls"):
        LLM(tmp_path / "static", mode="static", max_length=512, pooling="mean").embed(IDS)


def test_a_model_of_text_answers_yes_or_no_whether_it_is_said_to_be_a_reranker_or_not(
    tmp_path: Path,
) -> None:
    plain = {"classifier_from_token": None, "is_original_qwen3_reranker": None}
    folder = with_values("qwen3_reranker", "config.json", tmp_path / "model", **plain)
    queries, documents = zip(*SAID["pairs"], strict=True)
    sizes: dict[str, Any] = {"max_length": 512, "batch_size": 8}
    for pooling in (None, "yes_no"):
        llm = LLM(folder, pooling=pooling, **sizes)
        found = llm.score(queries, documents)
        np.testing.assert_allclose(found, FOUND["qwen3_reranker/score"], atol=1e-4, rtol=0)
    with pytest.raises(UserError, match="pooling is not known"):
        llm.retrieval.pooler()
    for case, said in {"bert_reranker": "has a classification head", "bert": "names mean"}.items():
        with pytest.raises(UserError, match=f"--pooling yes_no was given, .* {said}"):
            llm_of(case, pooling="yes_no").score(queries, documents)


def test_a_pooling_that_no_program_of_answers_has_is_refused(tmp_path: Path) -> None:
    path = str(FOLDER / "qwen3_reranker")
    config = EngineConfig(model_name_or_path=path, max_length=64, pooling="last")
    with pytest.raises(UserError, match=r"--pooling last is of programs .* add --task embed"):
        export_model(config, tmp_path / "static")
    assert not (tmp_path / "static").exists()


@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        *((case, {"dtype": "bfloat16"}) for case in ("bert", "modernbert", "qwen3_embedding")),
        *((case, {"quant_type": "weight_only_int8"}) for case in ("bert", "xlm_roberta")),
    ],
)
def test_other_types_of_weights_stay_near(case: str, scheme: dict[str, Any]) -> None:
    found, wanted = (llm_of(case, **kind).embed(IDS, normalize=True) for kind in (scheme, {}))
    assert np.einsum("ij,ij->i", found, wanted).min() >= 0.999


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_decoder_in_int8_stays_near_where_weights_are_as_large_as_published_ones(
    head_dim: int, tmp_path: Path
) -> None:
    # Of a deviation of 0.02, with 1,024 columns. Larger ones, as of the tiny checkpoint, sharpen
    # attention's weights, and each rounding with them.
    folder = write_wide("qwen3_embedding", tmp_path / "wide", head_dim, gain=0.64)
    kinds: tuple[dict[str, Any], ...] = ({"quant_type": "weight_only_int8"}, {})
    found, wanted = (
        LLM(folder, max_length=512, inference_model=True, **kind).embed(IDS) for kind in kinds
    )
    assert np.einsum("ij,ij->i", found, wanted).min() >= 0.999


def test_an_adapter_changes_vectors_as_when_it_is_merged(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "qwen3_embedding" / "config.json").read_text())
    folders = write_seven(tmp_path, config)
    named = tuple(f"{name}={folders[name]}" for name in ("four", "odd"))
    llm = llm_of("qwen3_embedding", lora_modules=named, max_lora_rank=64)
    plain = llm.embed(IDS)
    for name in ("four", "odd"):
        merged = llm_of("qwen3_embedding", lora_path=str(folders[name])).embed(IDS)
        found = llm.embed(IDS, adapter=name)
        np.testing.assert_allclose(found, merged, atol=1e-4, rtol=0)
        assert np.abs(found - plain).max() > 1e-2
    with pytest.raises(UserError, match="six"):
        llm.embed(IDS, adapter="six")
    assert nothing_is_held(llm)


@pytest.mark.parametrize("case", ["bert", "qwen3_embedding"])
def test_a_failure_of_the_device_ends_the_engine_and_one_of_a_text_the_text(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = llm_of(case)
    pooler = llm.retrieval.pooler()

    def fails(*_: Any) -> None:
        raise RuntimeError("an illegal address")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", fails)
        job = llm.add_texts([Text([5, 6])], pooler, None)
        assert llm.embedder.step() == [job]
        assert "an illegal address" in str(job.error)
        patch.setattr(llm.engine.runner, "launch", fails)
        llm.add_texts([Text([5, 6])], pooler, None)
        with pytest.raises(EngineError, match="the engine cannot go on"):
            llm.embedder.step()
    assert llm.embed([[5, 6]]).shape == (1, 32)
    assert nothing_is_held(llm)


def test_neither_long_texts_nor_answers_wait_for_ever() -> None:
    sizes: dict[str, Any] = {"block_size": 32, "num_cache_blocks": 16, "prefix_caching": False}
    llm = llm_of("qwen3_embedding", **sizes)
    running, ended = set[Any](), 0

    def tell(news: Any) -> None:
        nonlocal ended
        if news.is_last:
            running.discard(news.samples)
            ended += 1

    jobs, lengths = [], iter(range(10**6))
    for _ in range(150):
        while len(running) < 16:  # as many as hold all blocks, and others that wait
            num_tokens = 10 + next(lengths) * 7 % 50
            params = SamplingParams(max_new_tokens=num_tokens, min_length=num_tokens)
            samples = llm.samples([5, 6, 7] * 9, params)
            llm.answers.add([samples], tell)
            running.add(samples)
        if not llm.embedder.is_busy:
            jobs.append(llm.add_texts([Text([7] * 480)], llm.retrieval.pooler(), None))
        llm.step()
        llm.embedder.step()
    assert len(jobs) > 1
    assert not any(job.error for job in jobs)
    assert ended > 8
    for job in jobs:
        llm.embedder.abort(job)
    while llm.answers.is_busy:
        llm.step()
    assert nothing_is_held(llm)


def test_an_adapter_that_cannot_be_read_fails_no_other_job(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "qwen3_embedding" / "config.json").read_text())
    four = write_seven(tmp_path, config)["four"]
    settings: dict[str, Any] = {"lora_modules": (f"four={four}",), "max_lora_rank": 64}
    llm = llm_of("qwen3_embedding", **settings)
    pool = llm.embedder._pages.pool
    assert pool is not None

    def unreadable(*_: Any) -> None:
        raise OSError("the disk has failed")

    pool._write = unreadable
    pooler, texts = llm.retrieval.pooler(), [Text([5, 6])]
    plain, named = (llm.add_texts(texts, pooler, name) for name in (None, "four"))
    while llm.embedder.is_busy:
        llm.embedder.step(waits=False)
    assert plain.vectors is not None
    assert plain.error is None
    assert "the disk has failed" in str(named.error)
    assert nothing_is_held(llm)


def test_answers_go_on_while_a_texts_adapter_is_read(tmp_path: Path) -> None:
    class NotBlocking(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            raise AssertionError("the engine's loop waits")

    config = json.loads((FOLDER / "qwen3_embedding" / "config.json").read_text())
    four = write_seven(tmp_path, config)["four"]
    settings: dict[str, Any] = {"lora_modules": (f"four={four}",), "max_lora_rank": 64}
    llm, reading = llm_of("qwen3_embedding", **settings), NotBlocking()
    pool = llm.embedder._pages.pool
    assert pool is not None
    params = SamplingParams(max_new_tokens=6, min_length=6)
    samples = llm.samples([5, 6, 7], params)
    llm.answers.add([samples], lambda news: None)
    llm.step()
    pool._read = lambda _: reading
    job = llm.add_texts([Text([5, 6])], llm.retrieval.pooler(), "four")
    for _ in range(3):
        assert llm.embedder.step() == []
        assert llm.step() is not None
    assert not job.is_finished
    reading.set_result(None)
    assert llm.embedder.step() == [job]
    assert job.error is None
    pool._read, other = (lambda _: Future[Any]()), llm.samples([5, 6], params)
    llm.answers.add([other], lambda news: None)  # joins those that run: nothing holds it back
    while llm.answers.is_busy:
        llm.step()
    assert nothing_is_held(llm)


def test_two_queues_read_adapters_ahead_and_give_up_none_of_each_others(tmp_path: Path) -> None:
    config = json.loads((FOLDER / "qwen3_embedding" / "config.json").read_text())
    folders = [*write_seven(tmp_path, config).items()][:5]
    named = tuple(f"{name}={folder}" for name, folder in folders)
    sizes: dict[str, Any] = {"max_lora_rank": 64, "max_loras": 1, "max_cpu_loras": 1}
    store, free = llm_of("qwen3_embedding", lora_modules=named, **sizes).addons.adapters, Event()
    assert store is not None

    def read(_: Any) -> Any:
        free.wait(60)
        return []

    store._read_again = read  # type: ignore[method-assign, assignment]
    absent = [store.get(name) for name in store.names[:4]]
    try:
        first = [store._fetch(each) for each in absent]
        assert [store._fetch(each) for each in absent] == first
        assert not any(each is None or each.cancelled() for each in first)
    finally:
        free.set()


def test_a_program_of_answers_alone_says_how_to_export_one_of_vectors(tmp_path: Path) -> None:
    config = EngineConfig(model_name_or_path=str(FOLDER / "qwen3_embedding"), max_length=64)
    export_model(config, tmp_path / "static")
    llm = LLM(tmp_path / "static", mode="static", max_length=64)
    assert llm.retrieval.says_nothing
    with pytest.raises(UserError, match="export it with --task embed"):
        llm.embed([[5, 6]])
    assert nothing_is_held(llm)
