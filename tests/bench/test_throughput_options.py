"""Adapters and guides of a throughput run's requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from predict.bench import throughput
from predict.bench.cases import Case
from predict.bench.random_adapters import write_adapters
from predict.errors import UserError
from predict.llm import LLM
from tests.support.drafts import Generous

PROMPTS = [[5, 9, 11, 30]] * 5
DEMO = ["--model_name_or_path", "examples/demo_model", "--dtype", "float32", "--device", "cpu"]


def test_each_random_adapter_is_served_and_changes_the_answer(
    tiny_model: Path, tmp_path: Path
) -> None:
    modules = tuple(write_adapters("3x5", str(tiny_model), tmp_path, seed=0))
    llm = LLM(tiny_model, dtype="float32", max_length=64, lora_modules=modules, batch_size=4)
    case = Case(5, 4, 8)
    plan = throughput.Plan(
        cases=(case,), batch_size=4, repetitions=1, seed=0, adapters=("0", "1", "2")
    )
    _, outputs = throughput.timed(llm, PROMPTS, plan.params(5, 8))
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers[:2] == answers[3:]  # the first ones' adapters again
    base = throughput.Plan(cases=(case,), batch_size=4, repetitions=1, seed=0)
    _, (plain,) = throughput.timed(llm, PROMPTS[:1], base.params(1, 8))
    assert len({tuple(each) for each in [*answers[:3], plain.outputs[0].token_ids]}) == 4


def test_requests_have_adapters_in_turn_unless_told_otherwise(
    tiny_model: Path, tmp_path: Path
) -> None:
    words = [*DEMO, "--model_name_or_path", str(tiny_model), "--random_adapters", "2x4"]
    assert throughput.parse(words, tmp_path)[1].adapters == ("0", "1")
    without = [*words, "--request_adapters", "false"]
    assert throughput.parse(without, tmp_path)[1].adapters == ()


@pytest.mark.parametrize("wanted", ["0", "2x0", "x4", "2x-1", "3.5", "2000"])
def test_counts_of_adapters_that_are_none_are_refused(
    wanted: str, tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"--random_adapters .* \(allowed: NUMBER or"):
        write_adapters(wanted, str(tiny_model), tmp_path, seed=0)


def test_a_made_up_head_is_right_as_often_as_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("predict.drafting.DraftPolicy", Generous)
    output = tmp_path / "eagle.json"
    words = [*DEMO, "--speculate_method", "eagle", "--speculate_max_draft_token_num", "3"]
    words += ["--batch_size", "1", "--input_len", "16", "--output_len", "64", "--repetitions", "1"]
    words += ["--draft_agreement", "0.75", "--output_file", str(output)]
    assert throughput.main(words) == 0
    assert "accept" in capsys.readouterr().out


def test_a_guide_is_followed_and_its_masks_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "guided.json"
    words = [*DEMO, "--cases", "2x8x6", "--repetitions", "1", "--output_file", str(output)]
    assert throughput.main([*words, "--guide", '{"regex": "[0-9]{60,}"}']) == 0
    assert "masks of a step, ms" in capsys.readouterr().out
    (row,) = json.loads(output.read_text())["suites"]["throughput"]["rows"]
    assert row["values"]["mask_ms_per_step"] > 0
    assert throughput.main([*words, "--guide", '{"choice": ["a"]}']) != 0
    assert "give a --guide that goes on" in capsys.readouterr().err
