"""Random adapters for benchmarks: what they change, and that requests have them in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from predict.bench import random_adapters, throughput
from predict.errors import UserError
from predict.llm import LLM
from predict.request import SamplingParams

PROMPTS = [[5, 9, 11, 30]] * 5
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)


def test_each_adapter_is_served_and_changes_the_answer(tiny_model: Path, tmp_path: Path) -> None:
    words = random_adapters.write_adapters(str(tiny_model), tmp_path, 3, 5, seed=0)
    modules = tuple(words.split())
    llm = LLM(tiny_model, dtype="float32", max_length=64, lora_modules=modules, batch_size=4)
    _, outputs = throughput.timed(llm, PROMPTS, 8, ("0", "1", "2"))
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers[:2] == answers[3:]  # the first ones' adapters again
    (plain,) = llm.generate(PROMPTS[:1], GREEDY)
    assert len({tuple(each) for each in [*answers[:3], plain.outputs[0].token_ids]}) == 4
    assert llm.stats().num_adapters == 3


def test_requests_have_adapters_in_turn_unless_told_otherwise(
    tiny_model: Path, tmp_path: Path
) -> None:
    words = random_adapters.write_adapters(str(tiny_model), tmp_path, 2, 4, seed=0).split()
    common = ["--model_name_or_path", str(tiny_model), "--dtype", "float32", "--device", "cpu"]
    common += ["--cases", "2x4x2", "--lora_modules", *words]
    assert throughput.parse(common)[1].adapters == ("0", "1")
    assert throughput.parse([*common, "--request_adapters", "false"])[1].adapters == ()


@pytest.mark.parametrize(("num_adapters", "rank"), [(0, 8), (2, 0)])
def test_counts_below_one_are_refused(
    tiny_model: Path, tmp_path: Path, num_adapters: int, rank: int
) -> None:
    with pytest.raises(UserError, match=r"allowed: 1 or more"):
        random_adapters.write_adapters(str(tiny_model), tmp_path, num_adapters, rank, seed=0)
