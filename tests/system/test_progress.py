"""What a terminal sees while a run goes on."""

from __future__ import annotations

import fcntl
import os
import re
import select
import struct
import sys
import termios

import pytest

from predict.system.progress import LINE_SECONDS, REFRESH_SECONDS, Progress, draft_summary


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


def test_without_a_terminal_a_line_comes_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    bar = Progress(12, label="run 1 of 3")
    bar.on_step(10, 50)
    bar.on_finished()
    assert not capsys.readouterr().err
    bar._shown -= LINE_SECONDS
    bar.on_finished()
    bar.on_finished()
    assert re.fullmatch(r"run 1 of 3: 2 of 12 prompts, [\d.]+ tokens/s\n", capsys.readouterr().err)
    convert = Progress(3, unit="tensor")
    convert._shown -= LINE_SECONDS
    convert.on_finished()
    assert capsys.readouterr().err == "1 of 3 tensors\n"
    off = Progress(3, enabled=False)
    off._shown -= LINE_SECONDS
    off.on_finished()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("size", [(0, 0), (24, 0), (0, 60), (24, 60)])
def test_a_terminal_of_any_size_has_a_bar(
    size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    with os.fdopen(writer, "w") as terminal, os.fdopen(reader, "rb", 0) as seen:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress(4) as bar:
            bar.on_finished()
            bar._bar.refresh()
            shown = b""
            while b"1/4" not in shown:
                assert select.select([seen], [], [], 30)[0], shown
                shown += seen.read(4096)


def test_drafts_are_summed_up() -> None:
    assert draft_summary(0, 0, 0) == "no drafts were made"
    said = draft_summary(num_drafts=120, num_accepted=90, num_spans=40)
    assert said == "90 of 120 drafts accepted (75%), 3.25 tokens per step with drafts"
