"""run_quantization.py with its layers on a GPU: the checkpoint that the CPU makes, nearly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from predict.device import devices
from quant.config import QuantConfig, parse_command_line
from quant.run_quantization import run
from tests.support.quantization import write_model

RUNS = {
    "ptq": ("--quant_type", "a8w8", "--do_ptq", "--smooth", "--smooth_all_linears"),
    "gptq": ("--quant_type", "wint4", "--weightonly_group_size", "32", "--do_gptq"),
    "awq": ("--quant_type", "wint4", "--weightonly_group_size", "32", "--do_awq"),
}


@pytest.mark.parametrize("name", RUNS)
def test_layers_on_a_gpu_give_the_same_scales(
    gpu: devices.Device, tmp_path: Path, name: str
) -> None:
    model, text = write_model(tmp_path / "model"), tmp_path / "calibration.txt"
    words = np.random.default_rng(3).choice(["one", "two", "three", "and", "so", "on.", "\n"], 900)
    text.write_text(" ".join(words))
    made = {}
    for device in ("cpu", "gpu"):
        asked = ["--model_name_or_path", str(model), "--data_file", str(text), *RUNS[name]]
        asked += ["--output_path", str(tmp_path / device), "--device", device]
        asked += ["--batch_size", "2", "--src_length", "48"]
        run(QuantConfig.from_flags(parse_command_line(asked)), progress=False)
        made[device] = load_file(tmp_path / device / "model.safetensors")
    assert made["cpu"].keys() == made["gpu"].keys()
    for key, wanted in made["cpu"].items():
        got = made["gpu"][key]
        if wanted.dtype == np.int8:  # few codes lie on a border
            assert (got != wanted).mean() < 0.01, key
        elif wanted.dtype == np.float32:
            np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=1e-6, err_msg=key)
