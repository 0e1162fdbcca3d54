"""lm-evaluation-harness against the server finds what it finds with transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from predict import EngineConfig
from predict.server.config import ServerConfig
from tests.golden_evaluate.make import SCORES, TASKS
from tests.support.http_server import ModelServer
from tests.support.paths import DEMO, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled")]
MISSING = [name for name in ("lm_eval", "transformers") if not importlib.util.find_spec(name)]


@pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: pip install -e '.[evaluate]'")
def test_scores_are_those_of_transformers(tmp_path: Path) -> None:
    engine = EngineConfig(
        model_name_or_path=str(DEMO),
        dtype="float32",
        chat_template="none",
        inference_model=True,
        attention="append",
    )
    with ModelServer(ServerConfig(engine=engine)) as server:
        settings = {
            "model": "demo_model",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer": str(DEMO),
            "add_bos_token": True,  # as the tokenizer does, and transformers with it
            "num_concurrent": 4,
        }
        found = tmp_path / "found.json"
        words = ["local-completions", json.dumps(settings), str(found)]
        subprocess.run(
            [sys.executable, "-m", "tests.golden_evaluate.make", *words],
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
            check=True,
            timeout=300,
        )
    wanted, got = json.loads(SCORES.read_text()), json.loads(found.read_text())
    measured, generated = TASKS
    assert got[generated] == wanted[generated]
    assert wanted[generated]["metrics"]["exact_match"] > 0.2
    for (total, is_greedy), (wanted_total, was_greedy) in zip(
        got[measured]["answers"], wanted[measured]["answers"], strict=True
    ):
        assert total == pytest.approx(wanted_total, abs=2e-4)
        assert is_greedy == was_greedy
    assert got[measured]["metrics"] == pytest.approx(wanted[measured]["metrics"], rel=1e-3)
