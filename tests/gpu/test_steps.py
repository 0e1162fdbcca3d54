"""Steps by themselves on a GPU: hidden states, rows of other dtypes, the memory of graphs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM, SamplingParams
from predict.device import devices
from tests.support.golden import config, golden
from tests.support.gpu_engines import SETTINGS, runner_of
from tests.support.hidden import CASES, TAPS, WANTED, check_embeddings, check_hidden, step_of
from tests.support.processes import run_python


@pytest.mark.parametrize("case", CASES)
def test_embeddings_equal_transformers(gpu: devices.Device, case: str) -> None:
    check_embeddings(case, LLM(config(case, batch_size=3, max_length=128, **SETTINGS)))


@pytest.mark.parametrize("form", ["graph", "eager"])
def test_hidden_states_of_named_layers_are_transformers(gpu: devices.Device, form: str) -> None:
    llm = LLM(config("llama_gqa", batch_size=4, **SETTINGS))
    runner, prompts = runner_of(llm), golden("llama_gqa")["prompts"]
    if form == "eager":
        runner.graphs.pool = None
    check_hidden("llama_gqa", runner.run(step_of(prompts[-1:]), TAPS))
    some = [prompt for prompt in prompts if 1 < len(prompt) <= 128][:3]  # of a graph's four
    which = [prompts.index(prompt) for prompt in some]
    for prompt in some:
        alone = step_of(some[: some.index(prompt) + 1], 0, -1)
        runner.run(alone)
    for _ in range(3):
        outputs = runner.run(step_of(some, -1), TAPS)
        found = outputs.hidden["norm"].cpu().numpy()
        np.testing.assert_allclose(found, WANTED["llama_gqa/last"][which], atol=1e-4, rtol=0)
        assert outputs.logits is not None
        assert outputs.logits.shape[0] == len(some)
    assert any(shape.taps == TAPS for shape in runner.graphs) == (form == "graph")


def test_rows_of_any_dtype_reach_graphs(gpu: devices.Device, tmp_path: Path) -> None:
    done = run_python("-m", "tests.support.added_fields", tmp_path, "gpu")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    (same, eager_same), (other, eager_other) = found["marks 0"], found["marks 1"]
    assert same == eager_same != other == eager_other
    assert found["recorded"] > 0


def test_graphs_that_make_room_for_others_change_no_text(gpu: devices.Device) -> None:
    llm: Any = LLM(config("llama_gqa", batch_size=4, **SETTINGS))
    prompts = golden("llama_gqa")["prompts"][:4]
    params = [
        SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True, logprobs=logprobs)
        for count, logprobs in ((4, None), (8, None), (12, 1), (16, None))
    ]

    def tokens() -> list[Any]:
        return [output.token_ids for output in llm.generate(prompts, params)]

    graphs = runner_of(llm).graphs
    pool, graphs.pool = graphs.pool, None
    wanted, graphs.pool = tokens(), pool
    graphs.max_bytes = 1  # each graph makes room for the next one
    for _ in range(3):
        assert tokens() == wanted
    assert (len(graphs), graphs.num_recorded > 2) == (1, True)
