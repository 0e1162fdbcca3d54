"""A working directory as the pages of PaddleNLP have one, and the two kinds of operators."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from predict.device import library
from tests.support.paths import DEMO
from tests.support.quantization import write_model

LINES = 16  # of calibration data


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, whose answers end after a few tokens."""
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    ends = {"eos_token_id": list(range(3, 342, 4)), "max_position_embeddings": 256}
    return write_model(tmp_path_factory.mktemp("small") / "model", {**shape, **ends})


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with ./data in it; $REGATTA_MODEL_DIR is "models" there."""
    (tmp_path / "models" / "meta-llama").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    text = (DEMO / "calibration.txt").read_text()
    lines = [{"src": text[at : at + 12], "tgt": text[at + 12 : at + 24]} for at in range(LINES)]
    (tmp_path / "data" / "quant.json").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REGATTA_MODEL_DIR", str(tmp_path / "models"))
    return tmp_path


@pytest.fixture(params=["with", "without"])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine where the compiled operators were built, and one where none were."""
    if request.param == "without":
        monkeypatch.setattr(library, "find", lambda: None)
        monkeypatch.setattr(library, "load", lambda: None)
    elif library.find() is None:
        pytest.skip("no compiled operators")
    return str(request.param)
