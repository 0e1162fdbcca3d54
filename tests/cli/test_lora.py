"""--lora_path: the adapter's folder, the dtype that it brings, and its part in a run's identity."""

from __future__ import annotations

from pathlib import Path

import pytest

from predict.cli.flags import parse_flags
from predict.cli.identity import folder_digest
from predict.cli.run_config import PredictorConfig
from predict.errors import UserError
from tests.support.adapter_folders import (
    factors,
    paddlenlp_tensors,
    peft_tensors,
    write_paddlenlp,
    write_peft,
)


def run_of(model: Path, *words: str) -> PredictorConfig:
    return PredictorConfig.from_flags(parse_flags(["--model_name_or_path", str(model), *words]))


def test_dtype_is_that_of_paddlenlps_adapter_unless_given(tiny_model: Path, tmp_path: Path) -> None:
    tensors = {"lora_model_state.pdparams": paddlenlp_tensors(factors())}
    folder = str(write_paddlenlp(tmp_path, tensors, {"dtype": "bfloat16"}))
    run = run_of(tiny_model, "--lora_path", folder)
    assert run.engine.model.dtype == "bfloat16"
    assert run.engine.model.lora_path == folder
    assert any(note.startswith("--dtype is bfloat16, that of ") for note in run.notes)
    given = run_of(tiny_model, "--lora_path", folder, "--dtype", "float32")
    assert given.engine.model.dtype == "float32"


def test_pefts_adapters_bring_no_dtype(tiny_model: Path, tmp_path: Path) -> None:
    folder = write_peft(tmp_path, peft_tensors(factors()))
    run = run_of(tiny_model, "--lora_path", str(folder))
    assert run.engine.model.dtype == "float32"
    assert "--dtype is float32, the checkpoint's" in run.notes


def test_adapter_that_is_not_there_is_named(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'no/such-adapter' was not found"):
        run_of(tiny_model, "--lora_path", "no/such-adapter", "--dtype", "float32")
    file = tmp_path / "x"
    file.touch()
    with pytest.raises(UserError, match=r"--lora_path .* is a file; .* holds lora_config\.json or"):
        run_of(tiny_model, "--lora_path", str(file), "--dtype", "float32")


def test_every_byte_of_an_adapter_is_part_of_a_runs_identity(tmp_path: Path) -> None:
    """Of checkpoints samples are; this file is larger than all samples of it."""
    path = tmp_path / "adapter_model.safetensors"
    path.write_bytes(bytes(1 << 21))
    before, sampled = folder_digest(tmp_path, is_small=True), folder_digest(tmp_path)
    with path.open("r+b") as file:
        file.seek(20_000)  # between two samples
        file.write(b"\1")
    assert folder_digest(tmp_path) == sampled
    assert folder_digest(tmp_path, is_small=True) != before
