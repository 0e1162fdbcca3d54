"""The loading benchmark: its checkpoints, its settings, its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predict.bench import loading
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from tests.support import tiny
from tests.support.golden import GOLDEN


def test_a_checkpoint_of_the_models_shape_is_written_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, written = tiny.write(tmp_path / "model"), tmp_path / "written"
    words = ["--model_name_or_path", str(model), "--write_checkpoint", str(written)]
    words += ["--device", "cpu", "--quant_types", "weight_only_int4:32", "--repetitions", "1"]
    out = tmp_path / "out.json"
    assert loading.main([*words, "--dtype", "float32", "--output_file", str(out)]) == 0
    wanted, got = Checkpoint(model).tensors, Checkpoint(written).tensors
    assert {name: info.shape for name, info in got.items()} == {
        name: info.shape for name, info in wanted.items()
    }
    assert {info.dtype for info in got.values()} == {"BF16"}
    (result,) = json.loads(out.read_text())["results"]
    (run,) = result["runs"]
    assert 0 < run["engine_s"] < run["ready_s"]
    row = capsys.readouterr().out.splitlines()[-1].split()
    assert row[0] == "weight_only_int4:32"
    assert float(row[1]) == pytest.approx(run["ready_s"], abs=0.006)
    assert loading.main(words) == 2  # the folder is not empty


@pytest.mark.parametrize(
    "case", ["mixtral_8x7b", "qwen2_moe_a2_7b", "gpt_oss_20b", "deepseek_v3", "ernie4_5_moe_21b"]
)
def test_checkpoints_with_experts_are_written_and_read(tmp_path: Path, case: str) -> None:
    written = tmp_path / "written"
    loading.write_checkpoint(GOLDEN / case, written)
    found, wanted = Checkpoint(written).shapes, Checkpoint(GOLDEN / case).shapes
    assert found.items() <= wanted.items()
    assert any(".experts.1." in name for name in found)
    settings = {"device": "cpu", "inference_model": True, "max_length": 64}
    for changes in ({}, {"quant_type": "weight_only_int8"}):
        run = loading.time_one({"model_name_or_path": str(written), **settings, **changes})
        assert run["engine_s"] > 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("none", {}),
        ("a8w8", {"quant_type": "a8w8"}),
        ("w4a8:64", {"quant_type": "w4a8", "weightonly_group_size": 64}),
        ("a8w8_fp8:128", {"quant_type": "a8w8_fp8", "weight_block_size": (128, 128)}),
    ],
)
def test_groups_stand_behind_a_colon(name: str, settings: dict[str, Any]) -> None:
    assert loading.settings_of(name) == settings


def test_a_group_is_a_number() -> None:
    with pytest.raises(UserError, match="'w4a8:x' has no number behind the colon"):
        loading.settings_of("w4a8:x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model_name_or_path is missing"),
        (["--model_name_or_path", "x", "--repetitions", "0"], "--repetitions 0 is not 1 or more"),
        (["--model_name_or_path", "x", "--quant_types", "none,x9"], "quant_type 'x9' is not known"),
        (
            ["--model_name_or_path", "x", "--load_format", "dummy", "--write_checkpoint", "y"],
            "leave --write_checkpoint out",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert loading.main(words) != 0
    assert said in capsys.readouterr().err


def test_rows_say_how_much_more_than_the_first_they_take() -> None:
    def result(name: str, *ready: float) -> dict[str, Any]:
        runs = [{"ready_s": each, "engine_s": 1.0, "memory_bytes": 1 << 20} for each in ready]
        return {"quant_type": name, "runs": runs}

    lines = loading.table([result("none", 4.0, 9.0, 3.0), result("a8w8", 6.5)]).splitlines()
    assert lines[1].split() == ["none", "4.00", "1.00", "0.00", "1"]
    assert lines[2].split() == ["a8w8", "6.50", "1.00", "2.50", "1"]
