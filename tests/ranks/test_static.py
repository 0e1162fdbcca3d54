"""Exports for several ranks: a program for each, one manifest, and what their runs refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from export.export_model import export_kind, export_model
from predict import LLM, EngineConfig, SamplingParams
from predict.device import library
from predict.errors import UserError
from predict.loading.manifest import load_manifest
from tests.support import tiny
from tests.support.golden import config, runs
from tests.support.rank_models import RankProcesses

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
WHOLE = {"expert_parallel_degree": 2}
SLOW = pytest.mark.slow
SIZES: dict[str, Any] = {"dtype": "float32", "max_length": 64, "block_size": 16, "batch_size": 4}
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)
PROMPTS = [[5, 9, 11, 30, 7], [101, 3]]


@pytest.mark.parametrize(
    ("size", "case", "settings"),
    [
        (2, "llama_gqa", {}),
        *(pytest.param(2, case, {}, marks=SLOW) for case in ("olmo2_gqa", "falcon_40b")),
        pytest.param(2, "mixtral_8x7b", WHOLE, marks=SLOW),
        pytest.param(2, "ernie_3_5_se_parallel", {}, marks=SLOW),
        *(pytest.param(3, case, {}, marks=SLOW) for case in ("gemma_2b", "deepseek_v2_lite")),
        *(pytest.param(4, case, {}, marks=SLOW) for case in ("gpt_oss_20b", "bloom_7b")),
        pytest.param(4, "qwen3_tied", {}, marks=SLOW),
    ],
)
def test_text_and_logits_equal_transformers(
    ranks: Callable[[int], RankProcesses],
    tmp_path: Path,
    size: int,
    case: str,
    settings: dict[str, Any],
) -> None:
    given = {"inference_model": True, "tensor_parallel_degree": size, **settings}
    folders = []
    for max_length, _ in runs(case):
        folders.append(str(tmp_path / str(max_length)))
        export_model(config(case, max_length=max_length, **given), Path(folders[-1]))
    ranks(size).run("tests.support.rank_jobs:check_export", case=case, folders=folders, **settings)


def made(source: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(**{"model_name_or_path": str(source), **SIZES, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and its exports for one process and for two."""
    folder = tmp_path_factory.mktemp("exports")
    tiny.write(folder / "model")
    for size in (1, 2):
        sizes = {"tensor_parallel_degree": size, "quant_type": "weight_only_int8"}
        export_model(made(folder / "model", **sizes), folder / str(size))
    return folder


def test_an_export_has_a_program_for_each_rank_and_one_manifest(folder: Path) -> None:
    two = folder / "2"
    assert {path.name for path in two.iterdir()} == {
        *("config.json", "manifest.json", "rank_0", "rank_1")
    }
    for rank in ("rank_0", "rank_1"):
        assert {p.name for p in (two / rank).iterdir()} == {"model.json", "model.pdiparams"}
    manifest = load_manifest(two)
    assert manifest.ranks == {"size": 2, "unit": 1, "whole_experts": False}
    assert {name for name in manifest.files if "/" in name} == {
        f"rank_{rank}/model.{ending}" for rank in (0, 1) for ending in ("json", "pdiparams")
    }
    assert export_kind().is_whole(two)
    assert load_manifest(folder / "1").ranks is None


def test_an_export_takes_the_place_of_one_for_other_ranks(folder: Path, tmp_path: Path) -> None:
    for size, names in ((2, {"rank_0", "rank_1"}), (1, {"model.json", "model.pdiparams"})):
        export_model(made(folder / "model", tensor_parallel_degree=size), tmp_path / "out")
        assert names <= {path.name for path in (tmp_path / "out").iterdir()}
    (tmp_path / "out/rank_x").mkdir()
    with pytest.raises(UserError, match=r"would remove .*rank_x"):
        export_model(made(folder / "model"), tmp_path / "out", overwrite=True)


def test_a_run_of_as_many_ranks_answers_as_one_process(folder: Path) -> None:
    given = {"mode": "static", "rank_timeout": 60.0}
    answers = []
    for size in (1, 2):
        llm = LLM(made(folder / str(size), tensor_parallel_degree=size, **given))
        answers.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, GREEDY)])
    assert answers[0] == answers[1]


@pytest.mark.parametrize(("exported", "asked"), [(2, 1), (1, 2), (2, 4)])
def test_another_degree_is_refused_with_that_of_the_export(
    folder: Path, exported: int, asked: int
) -> None:
    said = f"is for {exported} rank.*tensor_parallel_degree is {asked}; give {exported}"
    with pytest.raises(UserError, match=said):
        LLM(made(folder / str(exported), mode="static", tensor_parallel_degree=asked))


def test_a_program_of_a_rank_that_was_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(folder / "2", tmp_path / "out")
    path = tmp_path / "out/rank_1/model.pdiparams"
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(data)
    sizes = {"mode": "static", "tensor_parallel_degree": 2, "rank_timeout": 60.0}
    with pytest.raises(UserError, match=re.escape("rank_1/model.pdiparams is not as it was exp")):
        LLM(made(tmp_path / "out", **sizes))


@pytest.mark.parametrize(
    ("arguments", "changes", "said"),
    [
        ({"enable_lora": True}, {}, "--enable_lora is of programs for one process"),
        ({}, {"inference_model": False}, "call the compiled operators"),
    ],
)
def test_what_no_program_of_ranks_does_is_refused_before_any_work(
    arguments: dict[str, bool], changes: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    settings = made(folder / "model", tensor_parallel_degree=2, **changes)
    with pytest.raises(UserError, match=said):
        export_model(settings, tmp_path / "out", **arguments)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
