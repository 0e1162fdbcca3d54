"""evaluate.py on a GPU: the table of the CPU, but for its last column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predict.device import devices
from quant.evaluate import main
from tests.support.gpu_products import skip_unless_here
from tests.support.paths import DEMO

ROWS = {
    "caches": ("none@fp8", "none@int4"),
    "weights": ("weight_only_int8", "weight_only_int4_g128", "weight_only_int4_g128+gptq"),
}


def table(path: Path, rows: tuple[str, ...], device: str) -> dict[str, dict[str, Any]]:
    words = ["--model_name_or_path", str(DEMO), "--max_tokens", "2048", "--ptq_step", "2"]
    words += ["--quant_type", ",".join(rows), "--output_file", str(path), "--device", device]
    assert main(words) == 0
    made: dict[str, dict[str, Any]] = json.loads(path.read_text())
    return made


@pytest.mark.parametrize("kind", ROWS)
def test_the_table_of_a_gpu_is_the_cpus(gpu: devices.Device, tmp_path: Path, kind: str) -> None:
    if kind == "weights":
        skip_unless_here("weight_only_int8", "weight_only_int4")
    rows = ROWS[kind]
    on_gpu, on_cpu = (table(tmp_path / f"{name}.json", rows, name) for name in ("gpu", "cpu"))
    for name in ("none", *rows):
        got, wanted = on_gpu[name], on_cpu[name]
        near = 0.015 if name.endswith("int4") else 0.005  # a rounding apart is a code of 16 apart
        assert got["perplexity"] == pytest.approx(wanted["perplexity"], rel=near), name
        assert got["kl"] == pytest.approx(wanted["kl"], rel=0.15, abs=2e-4), name
        assert got["decode_tokens_per_s"] > 0
