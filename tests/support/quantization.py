"""Quantized checkpoints of a tiny model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from quant.config import QuantConfig, parse_command_line
from quant.run_quantization import run
from tests.support import tiny
from tests.support.tiny import TOKENIZER

CHANGES: dict[str, Any] = {"vocab_size": 342, "num_hidden_layers": 3, "attention_bias": True}
NUM_BATCHES = 3


def write_model(folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """A tiny grouped-query Llama with biases and a tokenizer."""
    config = {**tiny.CONFIG, **CHANGES, **(changes or {})}
    tiny.write(folder, config)
    tensors = load_file(folder / "model.safetensors")
    generator = np.random.default_rng(9)
    for name in list(tensors):
        if "self_attn" in name and config["attention_bias"]:
            bias = generator.normal(0, 0.2, len(tensors[name]))
            tensors[name.replace(".weight", ".bias")] = bias.astype(np.float32)
    for name in tensors:
        if name.endswith("proj.weight"):
            tensors[name] /= 3.0  # tiny.write's are so large that small errors grow by the layer
        if name.endswith("layernorm.weight"):
            tensors[name][::17] *= 8.0  # channels as SmoothQuant and AWQ expect them
    save_file(tensors, folder / "model.safetensors")
    for path in TOKENIZER.glob("tokenizer*.json"):
        shutil.copy(path, folder / path.name)
    return folder


def words_of(model: Path, text: Path | None, output: Path, *more: str) -> list[str]:
    words = ["--model_name_or_path", str(model), "--output_path", str(output)]
    if text is not None:
        words += ["--data_file", str(text)]
    steps = ("ptq", "smooth", "shift", "awq", "autoclip", "gptq")
    for name in steps:
        words += [f"--{name}_step", str(NUM_BATCHES)]
    return [*words, "--batch_size", "2", "--src_length", "48", "--inference_model=false", *more]


def quantize(model: Path, text: Path | None, output: Path, *more: str) -> Path:
    config = QuantConfig.from_flags(parse_command_line(words_of(model, text, output, *more)))
    run(config, progress=False)
    return output


GROUPS = ("--weightonly_group_size", "32")


def error_between(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean squared error of logits, relative to their variance."""
    return float(np.mean((found - expected) ** 2) / np.var(expected))
