"""evaluate.py on a GPU: the table of the CPU, but for its last column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predict import device as devices
from quant.evaluate import main
from tests.gpu.test_schemes import runs_here

DEMO = Path(__file__).parents[2] / "examples" / "demo_model"
ROWS = ("weight_only_int8", "weight_only_int4_g128", "weight_only_int4_g128+gptq", "none@fp8")


def table(path: Path, *words: str) -> dict[str, dict[str, Any]]:
    model = ["--model_name_or_path", str(DEMO), "--max_tokens", "2048", "--ptq_step", "2"]
    assert main([*model, "--quant_type", ",".join(ROWS), "--output_file", str(path), *words]) == 0
    made: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return made


def test_the_table_of_a_gpu_is_the_cpus(gpu: devices.Device, tmp_path: Path) -> None:
    if not runs_here("weight_only_int8", "weight_only_int4"):
        pytest.skip("predict.quantization.SUPPORT: not on this GPU")
    on_gpu = table(tmp_path / "gpu.json", "--device", "gpu")
    on_cpu = table(tmp_path / "cpu.json", "--device", "cpu")
    for name in ("none", *ROWS):
        got, wanted = on_gpu[name], on_cpu[name]
        assert got["perplexity"] == pytest.approx(wanted["perplexity"], rel=0.005), name
        assert got["kl"] == pytest.approx(wanted["kl"], rel=0.15, abs=2e-4), name
        assert got["decode_tokens_per_s"] > 0
