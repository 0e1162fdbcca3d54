"""Every example runs as it stands, on the demo model."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SHOWN = {
    "generate.py": ["--- length", "--- 0: log-probability", "def binary_search"],
    "stream.py": ["class Stack:", "--- "],
    # The same last question, answered by what was said before it.
    "chat.py": ["return len(self.items)", "return len(self.jobs)"],
    "async_stream.py": ["--- whole", "--- 0 cache blocks in use"],
    "logprobs.py": ["perplexity of the prompt:", "% "],
    "edited_copies.py": ["without drafts:", "inference_with_reference:", "lookahead:"],
}
ARGUMENTS = {"edited_copies.py": ["1", "3"]}


def test_all_examples_are_listed() -> None:
    assert set(SHOWN) == {path.name for path in EXAMPLES.glob("*.py")} - {
        "train_demo_model.py",
        "train_drafts.py",
    }


@pytest.mark.parametrize("name", SHOWN)
def test_examples_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    out = capsys.readouterr().out
    for text in SHOWN[name]:
        assert text in out
