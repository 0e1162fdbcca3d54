"""--task embed: vectors of a data file, and what is refused before a model is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predict.device import library
from predict.predictor import main
from tests.support.vectors import FOLDER, SAID, llm_of

TEXTS = SAID["texts"]


def run(folder: Path, case: str, lines: list[dict[str, Any]], name: str, *more: str) -> int:
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--model_name_or_path", str(FOLDER / case), "--task", "embed", "--device", "cpu"]
    words += ["--data_file", str(data), "--output_file", str(folder / name), *more]
    return int(main(words))


def test_vectors_are_rows_of_a_file_or_lines(tmp_path: Path) -> None:
    lines = [{"src": text} for text in TEXTS]
    wanted = llm_of("bert").embed(TEXTS)
    assert run(tmp_path, "bert", lines, "out.npy") == 0
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, atol=1e-5, rtol=0)
    assert run(tmp_path, "bert", lines, "out.jsonl") == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["src"] for each in found] == TEXTS
    rows = [each["embedding"] for each in found]
    np.testing.assert_allclose(rows, wanted, atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
@pytest.mark.parametrize("case", ["bert", "qwen3_embedding"])
def test_vectors_of_two_ranks_are_those_of_one(case: str, tmp_path: Path) -> None:
    lines = [{"src": text} for text in TEXTS]
    more = ("--tensor_parallel_degree", "2", "--rank_timeout", "60")
    assert run(tmp_path, case, lines, "out.npy", *more) == 0
    wanted = llm_of(case).embed(TEXTS)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), wanted, atol=1e-5, rtol=0)


REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "no pooling": ("bert_reranker", {"src": "a"}, (), "pooling is not known"),
    "a conversation": ("bert", {"src": [{"role": "user", "content": "a"}]}, (), "conversation"),
    "a sampling key": ("bert", {"src": "a", "top_k": 3}, (), "top_k is of answers"),
    "a long text": (
        *("qwen3_embedding", {"src": "word " * 700}),
        *(("--max_length", "64"), "line 1 of data.jsonl: src has 2802 tokens (allowed: 1 to 64"),
    ),
    "a benchmark": ("bert", {"src": "a"}, ("--benchmark",), "goes with no --benchmark"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_by_name(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, line, more, said = REFUSED[name]
    assert run(tmp_path, case, [line], "out.npy", *more) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out.npy").exists()
