"""Pictures over ranks: dealt out, and their rows the same in all tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_model
from predict import LLM
from predict.config.engine import EngineConfig
from predict.device import library
from predict.ranks.pictures import owners
from tests.support.pictures import IMAGE_CASES, check_greedy_of, check_logits_of, image_model

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
SETTINGS: dict[str, Any] = {
    "max_length": 320,
    "block_size": 16,
    "batch_size": 3,
    "num_cache_blocks": 64,
    "tensor_parallel_degree": 2,
    "attention": "append",
    "inference_model": True,
}


def config(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model_name_or_path=str(folder), **{**SETTINGS, **changes})


def test_pictures_go_to_the_rank_with_the_least() -> None:
    assert owners([5, 3, 1, 1, 1, 9], 2) == [0, 1, 1, 1, 0, 1]
    assert owners([7], 3) == [0]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "qwen3_vl" else pytest.mark.slow) for c in IMAGE_CASES],
)
def test_text_and_logits_equal_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole passes, then passes that are cut between layers while others decode."""
    monkeypatch.setenv(
        "REGATTA_CHECK_RANKS", "1"
    )  # hidden states are those of all ranks, bit for bit
    whole = case in ("gemma3", "internvl")  # a picture's tokens are read at once
    budget = {} if whole else {"max_num_batched_tokens": 30}
    llm = LLM(config(image_model(case), encoder_budget=20, prefix_caching=False, **budget))
    check_logits_of(llm, case)
    for _ in range(2):
        check_greedy_of(llm, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3_vl", "gemma3", "internvl"])
def test_programs_of_ranks_have_one_tower(case: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export_model(config(image_model(case)), folder)
    assert len([*folder.rglob("*_tower.json")]) == 1
    llm = LLM(config(folder, mode="static"))
    check_logits_of(llm, case)
    check_greedy_of(llm, case)
