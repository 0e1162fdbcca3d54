"""Notes of the library: quiet in an embedding program, on stderr from a command."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from predict.system.notes import LOG, printed
from tests.support import tiny
from tests.support.paths import ROOT

BEYOND = ["--dtype", "float32", "--device", "cpu", "--max_length", "4096"]
SAID = "--max_length is 4096, and the model was made for 512 positions"


def stderr_of(*words: str | Path) -> str:
    return subprocess.run(
        [sys.executable, *map(str, words)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stderr


def test_an_embedding_program_hears_notes_where_it_asks_for_them(tmp_path: Path) -> None:
    model = tiny.write_with_tokenizer(tmp_path / "model")
    program = (
        "import sys, predict\n"
        "predict.LLM(sys.argv[1], dtype='float32', device='cpu', max_length=4096)"
    )
    assert stderr_of("-c", program, model) == ""
    asked = "import logging; logging.basicConfig(format='%(name)s %(levelname)s %(message)s')\n"
    assert f"regatta WARNING {SAID}" in stderr_of("-c", asked + program, model)


def test_a_command_prints_notes_on_stderr(tmp_path: Path) -> None:
    model = tiny.write_with_tokenizer(tmp_path / "model")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"src": "hello", "max_new_tokens": 2}) + "\n")
    words: list[str | Path] = ["-m", "predict.predictor", "--model_name_or_path", model, *BEYOND]
    words += ["--data_file", data, "--output_file", tmp_path / "out.json"]
    said = stderr_of(*words).splitlines()
    assert [line for line in said if SAID in line] == [line for line in said if "regatta:" in line]
    assert len([line for line in said if line.startswith(f"regatta: {SAID}")]) == 1


def test_printed_notes_have_their_traceback_and_no_control_sequence(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with printed():
        LOG.info("a \x1b[2J name")
        try:
            raise ValueError("gone")
        except ValueError as error:
            LOG.error("it failed:", exc_info=error)
    assert (
        not caplog.records
    )  # handlers of the root logger, as Paddle adds one, print no second line
    LOG.warning("nobody hears this")
    said = capsys.readouterr().err
    assert said.startswith("regatta: a \\x1b[2J name\nregatta: it failed:\nTraceback ")
    assert said.endswith("ValueError: gone\n")
    assert LOG.level == logging.NOTSET
