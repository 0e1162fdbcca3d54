"""What a type checker sees of the API in a user's program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PROGRAM = '''\
"""Answers two prompts."""

from regatta import LLM, AsyncLLM, EngineConfig, SamplingParams


def main() -> None:
    """Loads a model and asks it."""
    llm = LLM("org/name", batch_size=2, dtype="float32")
    params = SamplingParams(temperature=0.0, max_new_tokens=8, stop=["\\n"])
    outputs = llm.generate(["a", "b"], params)
    print(outputs[0].text, llm.stats().num_steps, AsyncLLM)
    for piece in llm.stream("a"):
        print(piece.token_ids)
    config = EngineConfig(model_name_or_path="x", lora_modules=["a=b"], max_length=None)
    LLM(config.changed(model_name_or_path="y"), chat_template=None)
    reveal_type([llm, outputs[0].text, piece, params.top_k, config.max_length])


if __name__ == "__main__":
    main()
'''
# A change of the program, and what is said of it.
WRONG = (
    ("batch_size=2", "batch_sise=2", '"batch_sise" for "LLM"; did you mean "batch_size"?'),
    ("batch_size=2", 'batch_size="2"', 'Argument "batch_size" to "LLM" has incompatible type'),
    ("temperature=0.0", "temprature=0.0", 'did you mean "temperature"?'),
    ("max_length=None", "max_lenght=4", '"max_lenght" for "EngineConfig"; did you mean'),
    ("import LLM,", "import LMM, LLM,", 'Module "regatta" has no attribute "LMM"'),
)


@pytest.mark.slow
def test_a_type_checker_finds_what_is_misspelt_and_knows_each_type(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(PROGRAM)
    for number, (old, new, _) in enumerate(WRONG):
        assert old in PROGRAM
        (tmp_path / f"wrong{number}.py").write_text(PROGRAM.replace(old, new))
    words = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary"]
    done = subprocess.run(
        [*words, *sorted(path.name for path in tmp_path.glob("*.py"))],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert not done.stderr
    of_right = re.findall(r"^right\.py:\d+: (.*)$", done.stdout, re.MULTILINE)
    assert len(of_right) == 1, of_right
    assert "Any" not in of_right[0]
    for number, (_, _, said) in enumerate(WRONG):
        lines = re.findall(rf"^wrong{number}\.py:\d+: error: (.*)$", done.stdout, re.MULTILINE)
        assert any(said in line for line in lines), (said, lines)
