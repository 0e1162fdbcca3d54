"""One process has nothing of ranks: no exchange, no operator, no process beside it."""

from __future__ import annotations

import os
from typing import Any

import pytest

from predict import LLM, SamplingParams
from predict.device import communicator, library
from predict.ops import compiled
from tests.support.demo import demo_config
from tests.support.rank_runs import children

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
# What a step of one token calls.
DECODE = ["regatta_embedding", "regatta_blocks", "regatta_logits", "regatta_sample"]


def test_a_step_calls_the_operators_of_one_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> None:
        raise AssertionError(f"ranks exchange: {name}")

    called: list[str] = []
    run = compiled._run()

    def counted(name: str, *arguments: Any) -> Any:
        called.append(name)
        return run(name, *arguments)

    monkeypatch.setattr(communicator, "_call", refuse)
    before = children(os.getpid())
    llm = LLM(demo_config())
    monkeypatch.setattr(compiled, "_run", lambda: counted)
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    llm.generate([[5, 6, 7]], params)
    assert [name for name in called if "rank" in name] == []
    assert called[-2 * len(DECODE) :] == 2 * DECODE
    assert children(os.getpid()) == before
