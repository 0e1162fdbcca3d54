"""What commands and LLM leave to the model: its dtype, and the longest sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.export_model import export_model
from export.export_model import main as export
from predict import LLM, EngineConfig, SamplingParams
from predict.cli.flags import parse_flags
from predict.cli.run_config import PredictorConfig
from predict.device import devices
from predict.errors import UserError
from predict.loading.defaults import with_model_defaults
from predict.loading.manifest import load_manifest
from predict.loading.model import read_spec
from predict.server.flags import parse
from predict.server.from_flags import server_config
from quant.config import parse_command_line
from quant.evaluate import FLAGS as EVALUATE
from quant.evaluate import EvaluateConfig
from tests.support import tiny
from tests.support.gguf_models import convert
from tests.support.golden import GOLDEN

WORDS = {"absent": (), "auto": ("--dtype", "auto")}
POSITIONS = {"opt_125m": 256, "gpt2_small": 144}  # that they have learned


def config_of(model: Path, *words: str) -> PredictorConfig:
    given = ("--model_name_or_path", str(model), "--device", "cpu", *words)
    return PredictorConfig.from_flags(parse_flags(given))


def stored_in(folder: Path, dtype: Any, /, **changes: Any) -> Path:
    """A tiny model whose matrices have this dtype; its norms have float32."""
    tiny.write(folder, changes)
    path = folder / "model.safetensors"
    tensors = {n: v.astype(dtype if v.ndim > 1 else v.dtype) for n, v in load_file(path).items()}
    save_file(tensors, path)
    return folder


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_every_command_takes_the_checkpoints_dtype(words: tuple[str, ...], tmp_path: Path) -> None:
    model = tiny.write(tmp_path / "model", {"torch_dtype": "bfloat16"})
    run = config_of(model, *words)
    assert run.engine.model.dtype == "bfloat16"
    assert "--dtype is bfloat16, the checkpoint's" in run.notes
    assert config_of(model, "--dtype", "float32").engine.model.dtype == "float32"
    base = ["--model_name_or_path", str(model), "--device", "cpu", *words]
    assert server_config(parse(base), {})[0].engine.model.dtype == "bfloat16"
    assert export([*base, "--max_length", "32", "--output_path", str(tmp_path / "out")]) == 0
    assert load_manifest(tmp_path / "out").dtype == "bfloat16"
    static = config_of(tmp_path / "out", "--mode", "static", *words)
    assert static.engine.model.dtype == "bfloat16"
    text = tmp_path / "text.txt"
    text.write_text("text")
    rows = ["--quant_type", "weight_only_int8", "--data_file", str(text)]
    assert EvaluateConfig.from_flags(parse_flags([*base, *rows], EVALUATE)).dtype == "bfloat16"
    assert parse_command_line([*base, "--output_path", "out"])["dtype"] is None  # as stored


@pytest.mark.parametrize("settings", [{}, {"dtype": "auto"}], ids=str)
def test_llm_takes_the_dtype_of_the_checkpoint_and_of_the_program(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny.write(tmp_path / "model", {"torch_dtype": "bfloat16"})
    llm = LLM(model, max_length=32, **settings)
    export_model(EngineConfig(model_name_or_path=model, max_length=32, **settings), tmp_path / "o")
    static = LLM(tmp_path / "o", mode="static", **settings)
    assert llm.config.model.dtype == static.config.model.dtype == "bfloat16"
    assert static.config.max_length == 32
    params = SamplingParams(temperature=0.0, max_new_tokens=8, ignore_eos=True)
    texts = [one.generate([[5, 6, 7]], params)[0].token_ids for one in (llm, static)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("changes", "stored", "dtype"),
    [
        ({"dtype": "float16", "torch_dtype": "bfloat16"}, np.float32, "float16"),
        ({"torch_dtype": "torch.float16"}, np.float32, "float16"),
        ({}, np.float16, "float16"),
        ({"torch_dtype": None}, np.float32, "float32"),
        ({"torch_dtype": "auto"}, np.float16, "float16"),
        ({"torch_dtype": "float64"}, np.float64, "float32"),
    ],
    ids=str,
)
def test_where_config_names_no_dtype_the_matrices_have_it(
    changes: dict[str, Any], stored: Any, dtype: str, tmp_path: Path
) -> None:
    model = stored_in(tmp_path / "model", stored, **changes)
    assert config_of(model).engine.model.dtype == dtype
    assert config_of(model, "--load_format", "dummy").engine.model.dtype in (dtype, "float32")


@pytest.mark.parametrize(
    ("capability", "settings", "dtype"),
    [
        ((9, 0), {}, "float32"),
        ((9, 0), {"quant_type": "weight_only_int8"}, "bfloat16"),
        ((7, 5), {"quant_type": "weight_only_int8"}, "float16"),
    ],
)
def test_a_gpu_that_lacks_the_dtype_gets_the_nearest(
    capability: tuple[int, int],
    settings: dict[str, Any],
    dtype: str,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info = devices.DriverInfo(13, 13, "", (devices.Gpu("one", capability, 1, 1),))
    monkeypatch.setattr(devices, "driver_info", lambda: info)
    monkeypatch.setattr(devices, "choose", lambda name: devices.Device("gpu:0", 0, name))
    config = EngineConfig(
        model_name_or_path=tiny_model, device="gpu", inference_model=True, **settings
    )
    assert with_model_defaults(config, *read_spec(tiny_model)).model.dtype == dtype


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
def test_a_family_beyond_float16_never_gets_it(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = json.loads((GOLDEN / "gemma3_text_1b" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "torch_dtype": stored}))

    def dtype_of(**settings: Any) -> str:
        config = EngineConfig(model_name_or_path=tmp_path, inference_model=True, **settings)
        return with_model_defaults(config, *read_spec(tmp_path)).model.dtype

    assert dtype_of() == "bfloat16"
    with pytest.raises(UserError, match=r"dtype float16: .* gemma3_text .*bfloat16, float32"):
        dtype_of(dtype="float16")
    info = devices.DriverInfo(13, 13, "", (devices.Gpu("one", (7, 5), 1, 1),))
    monkeypatch.setattr(devices, "driver_info", lambda: info)
    monkeypatch.setattr(devices, "choose", lambda name: devices.Device("gpu:0", 0, name))
    assert dtype_of(device="gpu") == "float32"


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (("--avx_model", "--avx_type", "bf16"), "bfloat16"),
        (("--avx_model", "--avx_cachekv_type", "fp16"), "float16"),
        (("--avx_model", "--avx_cachekv_type", "int8"), "float32"),
    ],
    ids=" ".join,
)
def test_flags_of_the_cpu_path_name_the_dtype(
    words: tuple[str, ...], dtype: str, tiny_model: Path
) -> None:
    assert config_of(tiny_model, *words).engine.model.dtype == dtype


@pytest.mark.parametrize("case", POSITIONS)
def test_a_default_length_fits_the_learned_positions(case: str, tmp_path: Path) -> None:
    model, most = GOLDEN / case, POSITIONS[case]
    run = config_of(model)
    assert run.engine.max_length == run.sampling_params.max_length == most
    assert run.engine.scheduling.src_length == most - 1
    assert any(note.startswith(f"--max_length is {most}") for note in run.notes)
    assert config_of(model, "--max_new_tokens", "16").engine.max_length == most
    assert config_of(model, "--benchmark").max_new_tokens == 1
    assert LLM(model).config.max_length == most
    words = ["--model_name_or_path", str(model), "--device", "cpu", "--output_path"]
    assert export([*words, str(tmp_path / "out")]) == 0
    assert load_manifest(tmp_path / "out").max_length == most
    assert LLM(tmp_path / "out", mode="static").config.max_length == most
    asked = config_of(model, "--max_length", str(most + 1)).engine
    with pytest.raises(UserError, match=f"use --max_length {most} or less"):
        LLM(asked)


def test_a_default_length_fits_the_draft_model(tiny_model: Path, tmp_path: Path) -> None:
    draft = tiny.write(tmp_path / "draft", {"max_position_embeddings": 100})
    words = ("--speculate_method", "draft_model", "--draft_model_name_or_path", str(draft))
    run = config_of(tiny_model, *words)
    assert run.engine.max_length == run.sampling_params.max_length == 100
    assert "--max_length is 100, the positions that the draft model was made for" in run.notes
    assert len(LLM(run.engine).generate([[5, 6, 7]], run.sampling_params)) == 1
    with pytest.raises(UserError, match="made for 100 positions, --max_length is 101; lower"):
        LLM(config_of(tiny_model, *words, "--max_length", "101").engine)


def test_a_gguf_files_dtype_is_that_of_its_matrices(tmp_path: Path) -> None:
    path = convert(GOLDEN / "llama_gqa", tmp_path / "x.gguf")
    assert LLM(path, max_length=32).config.model.dtype == "float32"
