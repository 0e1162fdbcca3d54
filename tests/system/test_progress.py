"""What a terminal sees while a run goes on."""

from __future__ import annotations

import pytest

from predict.system.progress import REFRESH_SECONDS, Progress, draft_summary


def shown(bar: Progress, capsys: pytest.CaptureFixture[str]) -> str:
    bar._shown -= REFRESH_SECONDS  # as if that time had passed
    bar.on_step(0, 0)
    return capsys.readouterr().err.split("\r")[-1]


def test_a_lone_answer_counts_its_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(1, enabled=True, num_tokens=200) as bar:
        bar.on_step(512, 0)
        assert "512 prompt tokens read" in shown(bar, capsys)
        bar.on_step(0, 50)
        line = shown(bar, capsys)
        assert "25%" in line
        assert "50/200" in line
        assert "tokens/s" in line
        bar.on_step(0, 10)
        bar.on_finished()
        assert "60/200" in shown(bar, capsys)


def test_several_answers_count_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(4, enabled=True) as bar:
        bar.on_step(10, 50)
        bar.on_finished()
        assert "1/4" in shown(bar, capsys)


def test_a_labelled_bar_says_which_run_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(2, enabled=True, num_tokens=20, label="run 1 of 3") as bar:
        assert "run 1 of 3" in shown(bar, capsys)


def test_drafts_are_summed_up() -> None:
    assert draft_summary(0, 0, 0) == "no drafts were made"
    said = draft_summary(num_drafts=120, num_accepted=90, num_spans=40)
    assert said == "90 of 120 drafts accepted (75%), 3.25 tokens per step with drafts"
