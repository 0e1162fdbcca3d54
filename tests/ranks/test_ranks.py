"""One model over several CPU ranks: their text is that of one, and one refusal says why not."""

from __future__ import annotations

import gc
import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from predict import LLM, EngineConfig, Guide, SamplingParams
from predict.device import library
from predict.errors import EngineError, UserError
from predict.ranks import front
from predict.ranks.front import Ranks
from predict.ranks.messages import Down
from tests.support.demo import demo_config
from tests.support.paths import DEMO, ROOT
from tests.support.processes import run_python
from tests.support.rank_runs import is_gone, wait_until

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
PROMPTS: list[str | list[int]] = ["def main(", "once upon a time", [3, 4, 5], "import os\n" * 40]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=12)
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 7, "max_new_tokens": 12}
PARAMS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(**SAMPLED, n=2),
    "narrowed": SamplingParams(**SAMPLED, min_p=0.05, top_k=20),
    "adjusted": SamplingParams(
        **SAMPLED,
        repetition_penalty=1.3,
        frequency_penalty=0.2,
        no_repeat_ngram_size=2,
        logit_bias={14: -4.0},
        bad_words=["the", "in a"],
        min_length=5,
    ),
    "measured": SamplingParams(temperature=0.0, max_new_tokens=6, logprobs=3, prompt_logprobs=2),
    "beams": SamplingParams(num_beams=3, max_new_tokens=8),
    "guided": SamplingParams(**SAMPLED, guide=Guide(regex="[a-z]{3,9} [0-9]+")),
}


@pytest.fixture(scope="module")
def one() -> LLM:
    return LLM(demo_config())


@pytest.fixture(scope="module")
def two() -> LLM:
    return LLM(demo_config(tensor_parallel_degree=2, rank_timeout=60.0))


def ranks_of(llm: LLM) -> Ranks:
    return llm.engine.runner._ranks  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", PARAMS)
def test_two_ranks_answer_as_one_does(one: LLM, two: LLM, name: str) -> None:
    wanted, found = (llm.generate(PROMPTS, PARAMS[name]) for llm in (one, two))
    for theirs, ours in zip(wanted, found, strict=True):
        for a, b in zip(theirs.outputs, ours.outputs, strict=True):
            assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
            for p, q in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert p.keys() == q.keys()
                for token in p:
                    assert p[token].logprob == pytest.approx(q[token].logprob, abs=1e-4)


def test_two_ranks_embed_as_one_does(one: LLM, two: LLM) -> None:
    wanted, found = (llm.embed(["hello", "a longer text"], "mean") for llm in (one, two))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_a_rank_has_its_part_of_the_weights(one: LLM, two: LLM) -> None:
    spec = two.spec
    assert spec.share is None  # the front's is the whole network's
    assert two.decoder is None
    assert one.stats().num_cache_blocks == two.stats().num_cache_blocks
    assert one.stats().rank_memory_bytes == ()
    by_rank = two.stats().rank_memory_bytes
    assert len(by_rank) == 2
    assert two.stats().peak_memory_bytes > sum(by_rank)


def test_a_step_that_all_ranks_refuse_ends_alone(two: LLM) -> None:
    with pytest.raises(RuntimeError, match=r"layers\.99"):
        two.engine.runner.run(one_token(two), ("layers.99",))
    assert two.generate("hello", GREEDY)[0].outputs[0].token_ids


def one_token(llm: LLM) -> Any:
    from predict.nn.inputs import empty_example

    return empty_example(fields=llm.engine.fields)


def test_ranks_end_with_their_llm() -> None:
    llm = LLM(demo_config(tensor_parallel_degree=2, rank_timeout=60.0))
    ids = ranks_of(llm).process_ids
    assert all(Path(f"/proc/{each}").exists() for each in ids)
    del llm
    gc.collect()
    assert not any(Path(f"/proc/{each}").exists() for each in ids)


def test_a_rank_that_dies_ends_the_engine_by_name() -> None:
    llm = LLM(demo_config(tensor_parallel_degree=2, rank_timeout=60.0))
    ids = ranks_of(llm).process_ids
    os.kill(ids[1], 9)
    endless = SamplingParams(temperature=0.0, max_new_tokens=200, ignore_eos=True)
    with pytest.raises(EngineError, match=rf"rank 1 \(process {ids[1]}\) was ended by signal 9"):
        llm.generate(["hello"] * 50, endless)
    wait_until("the other rank ends", 60, lambda: is_gone(ids[0]))


def test_blocks_that_are_not_copied_end_the_ranks() -> None:
    llm = LLM(demo_config(tensor_parallel_degree=2, rank_timeout=60.0))
    ranks_of(llm).send(Down.COPY, [np.array([9], np.int64), np.zeros((0, 2), np.int64)])
    with pytest.raises(EngineError, match=r"rank . \(process \d+\) ended with exit code 1"):
        llm.generate("hello", GREEDY)


def test_a_step_that_is_broken_off_ends_the_ranks_and_leaves_no_answer_to_the_next() -> None:
    llm = LLM(demo_config(tensor_parallel_degree=2, rank_timeout=60.0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_answer", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", GREEDY)
    with pytest.raises(EngineError, match="KeyboardInterrupt broke a step off"):
        llm.generate("hello", GREEDY)


UNEVEN = """
import sys
from predict import rank_process
from predict.engine.runner.networks import HostNetwork

run = HostNetwork.run

def changed(self, inputs, taps=()):
    outputs = run(self, inputs, taps)
    return outputs._replace(hidden={tap: each + 1 for tap, each in outputs.hidden.items()})

if sys.argv[-1] == "1":
    HostNetwork.run = changed
rank_process.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_even", [True, False])
def test_ranks_that_are_checked_answer_or_say_which_of_them_differ(
    one: LLM, is_even: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGATTA_CHECK_RANKS", "1")
    if not is_even:
        (tmp_path / "uneven.py").write_text(UNEVEN)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.setattr("predict.ranks.start.Ranks", partial(Ranks, module="uneven"))
    llm = LLM(demo_config(tensor_parallel_degree=2, rank_timeout=60.0))
    if is_even:
        wanted, found = (each.generate(PROMPTS, GREEDY) for each in (one, llm))
        assert [a.outputs[0].token_ids for a in found] == [a.outputs[0].token_ids for a in wanted]
        return
    with pytest.raises(RuntimeError, match=r"hidden states of ranks \[1\] are not those of rank 0"):
        llm.generate("hello", GREEDY)


REFUSED: dict[str, dict[str, Any]] = {
    "device gpu: CPU ranks run today": {"device": "gpu"},
    "expert_parallel_degree 3": {"expert_parallel_degree": 3},
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_ranks_do_not_do_is_refused_by_name(said: str) -> None:
    with pytest.raises(UserError, match=said):
        EngineConfig(model_name_or_path="x", tensor_parallel_degree=2, **REFUSED[said])


@pytest.mark.parametrize(
    ("said", "settings", "built"),
    [
        ("heads", {"tensor_parallel_degree": 7}, True),
        ("whole experts, and .* none", {"expert_parallel_degree": 2}, True),
        ("compiled operators are not there", {"inference_model": False}, False),
    ],
)
def test_what_cannot_run_is_refused_before_any_process_starts(
    said: str, settings: dict[str, Any], built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predict.ranks.start.Ranks", Mock(side_effect=AssertionError("started")))
    if not built:
        monkeypatch.setattr(library, "find", lambda: None)
    with pytest.raises(UserError, match=said):
        LLM(demo_config(**{"tensor_parallel_degree": 2, **settings}))


@pytest.mark.parametrize("is_checkout", [True, False])
def test_a_checkout_alone_is_on_the_path_of_ranks(
    is_checkout: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_checkout:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setenv("PYTHONPATH", "there")
    monkeypatch.setattr(front, "__file__", str(tmp_path / "predict" / "ranks" / "front.py"))
    wanted = f"{tmp_path}{os.pathsep}there" if is_checkout else "there"
    assert front._environment(1)["PYTHONPATH"] == wanted


def test_the_command_answers_as_with_one_rank(one: LLM, tmp_path: Path) -> None:
    (tmp_path / "decimal.py").write_text("raise SystemExit(3)")  # not ours to import
    data, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    data.write_text('{"src": "def main("}\n{"src": "once upon a time"}\n')
    done = run_python(
        *(ROOT / "predict" / "predictor.py", "--model_name_or_path", DEMO, "--dtype", "float32"),
        *("--device", "cpu", "--data_file", data, "--output_file", out, "--batch_size", "2"),
        *("--decode_strategy", "greedy_search", "--max_length", "24"),
        *("--tensor_parallel_size", "2", "--rank_timeout", "60"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1: " in done.stderr
    texts = [each.outputs[0].text for each in one.generate(PROMPTS[:2], GREEDY)]
    found = [json.loads(line)["output"] for line in out.read_text().splitlines()]
    assert [each[: len(text)] for each, text in zip(found, texts, strict=True)] == texts
