"""Vectors and scores on a GPU: each family, packed in any way, beside answers, in 16 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM, EngineConfig, SamplingParams
from predict.engine.embedding import Text
from tests.support.vectors import (
    CASES,
    FOLDER,
    FOUND,
    IDS,
    RERANKERS,
    SAID,
    llm_of,
    nothing_is_held,
    write_wide,
)

GPU: dict[str, Any] = {"device": "gpu"}
POOLINGS = ("mean", "cls", "last", "max", "weightedmean")


pytestmark = pytest.mark.usefixtures("gpu")


@pytest.mark.parametrize("case", CASES)
def test_pooled_hidden_states_equal_transformers(case: str) -> None:
    llm = llm_of(case, **GPU)
    for pooling in ("mean", "cls", "last"):
        found = llm.embed(IDS, pooling, normalize=False)
        np.testing.assert_allclose(found, FOUND[f"{case}/{pooling}"], atol=1e-4, rtol=0)
    assert nothing_is_held(llm)


@pytest.mark.parametrize("case", RERANKERS)
def test_scores_and_their_order_equal_transformers(case: str) -> None:
    llm, wanted = llm_of(case, **GPU), FOUND[f"{case}/score"]
    queries, documents = zip(*SAID["pairs"], strict=True)
    np.testing.assert_allclose(llm.score(queries, documents), wanted, atol=1e-4, rtol=0)
    ranked = llm.rerank(queries[0], documents, top_n=3)
    assert [each.index for each in ranked] == np.argsort(-wanted, kind="stable")[:3].tolist()


@pytest.mark.parametrize("case", ["modernbert", "embedding_gemma", "qwen3_embedding"])
def test_an_exported_program_makes_the_same_vectors(case: str, tmp_path: Path) -> None:
    config = EngineConfig(
        model_name_or_path=str(FOLDER / case),
        max_length=512,
        inference_model=True,
        attention="append",
        **GPU,
    )
    export_model(config, tmp_path, task="embed")
    found = LLM(tmp_path, mode="static", max_length=512, batch_size=8, **GPU).embed(IDS, "mean")
    np.testing.assert_allclose(found, llm_of(case).embed(IDS, "mean"), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("case", "head_dim", "dtype"),
    [
        ("modernbert", 64, "bfloat16"),
        ("modernbert", 64, "float16"),
        ("embedding_gemma", 256, "bfloat16"),  # its values are too large for float16
    ],
)
def test_half_precision_stays_near_float32_on_the_cpu(
    case: str, head_dim: int, dtype: str, tmp_path: Path
) -> None:
    folder = write_wide(case, tmp_path / case, head_dim)
    settings: dict[str, Any] = {"max_length": 512, "batch_size": 8}
    wanted = LLM(folder, **settings).embed(IDS, "mean")
    found = LLM(folder, dtype=dtype, **settings, **GPU).embed(IDS, "mean")
    assert np.einsum("ij,ij->i", found, wanted).min() >= 0.999


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["bert", "modernbert", "embedding_gemma", "qwen3_embedding"])
def test_a_text_has_the_same_bits_alone_and_packed(case: str, dtype: str, tmp_path: Path) -> None:
    wide = {"modernbert": 64, "embedding_gemma": 256}.get(case)
    folder = FOLDER / case if wide is None else write_wide(case, tmp_path / case, wide)
    llm = LLM(
        folder,
        dtype=dtype,
        batch_invariant=True,
        inference_model=True,
        max_length=512,
        batch_size=8,
        max_num_batched_tokens=700,
        prefix_caching=False,
        **GPU,
    )
    for pooling in POOLINGS if case == "qwen3_embedding" else ("mean",):
        alone = np.concatenate([llm.embed([ids], pooling) for ids in IDS])
        np.testing.assert_array_equal(llm.embed(IDS, pooling), alone)
        np.testing.assert_array_equal(llm.embed(IDS[::-1], pooling)[::-1], alone)


@pytest.mark.parametrize("form", ["graph", "eager", "logprobs", "beams"])
def test_texts_ride_in_the_steps_of_answers_and_neither_changes(form: str) -> None:
    llm = llm_of(
        "qwen3_embedding",
        max_num_batched_tokens=100,
        block_size=16,
        prefix_caching=False,
        batch_invariant=True,
        **GPU,
    )
    runner: Any = llm.engine.runner
    if form == "eager":
        runner.graphs.pool = None
    forms: dict[str, dict[str, Any]] = {"logprobs": {"logprobs": 2}, "beams": {"num_beams": 3}}
    extra = forms.get(form, {})
    params = SamplingParams(max_new_tokens=40, temperature=0.0, ignore_eos=True, **extra)
    prompts = [[5, 6, 7 + n] for n in range(2)]
    answers = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    texts = [Text(ids) for ids in (*IDS, list(range(5, 405)), *([7 + n] for n in range(20)))]
    pooler = llm.retrieval.pooler("mean")
    wanted = llm.run_texts(texts, pooler, None)
    told: list[Any] = []
    groups = [llm.samples(prompt, params) for prompt in prompts]
    llm.answers.add(groups, told.append)
    llm.step()
    run, num_rounds = runner.run, 0

    def counted(*given: Any) -> Any:
        nonlocal num_rounds
        num_rounds += 1
        return run(*given)

    runner.run = counted
    job = llm.add_texts(texts, pooler, None)
    while not job.is_finished:
        llm.step()
        llm.embedder.step()
    assert num_rounds == 0
    np.testing.assert_array_equal(job.vectors, wanted)
    while llm.answers.is_busy:
        llm.step()
    assert [group.output().outputs[0].token_ids for group in groups] == answers
    assert nothing_is_held(llm)
