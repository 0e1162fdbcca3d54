"""LoRA adapters for tests: PEFT's goldens, and folders of either kind for the tiny model."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from predict.device.place import to_float32
from predict.loading.checkpoint import Checkpoint
from tests.support import tiny
from tests.support.paths import ROOT

Array = npt.NDArray[np.float32]
ADAPTERS = ROOT / "tests" / "golden_adapters"
CASES = sorted(path.parent.name for path in ADAPTERS.glob("*/golden.json"))
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
RANK, ALPHA = 4, 6
PEFT: dict[str, Any] = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA}
PADDLENLP: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "dtype": "float32"}


@functools.cache
def golden(case: str) -> dict[str, Any]:
    return json.loads((ADAPTERS / case / "golden.json").read_text())


def factors(rank: int = RANK, names: tuple[str, ...] = (Q, DOWN)) -> dict[str, tuple[Array, Array]]:
    """A [rank, in] and B [out, rank] of linears of the tiny model."""
    generator = np.random.default_rng(rank)
    shapes = {name: tensor.shape for name, tensor in tiny.tensors(tiny.CONFIG).items()}
    return {
        name: (
            0.3 * generator.standard_normal((rank, shapes[f"{name}.weight"][1]), np.float32),
            0.3 * generator.standard_normal((shapes[f"{name}.weight"][0], rank), np.float32),
        )
        for name in names
    }


def peft_tensors(pairs: Mapping[str, tuple[Array, Array]]) -> dict[str, Any]:
    """Factors under PEFT's names."""
    tensors: dict[str, Any] = {}
    for name, (a, b) in pairs.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    return tensors


def paddlenlp_tensors(pairs: Mapping[str, tuple[Array, Array]]) -> dict[str, Any]:
    """Factors under PaddleNLP's names, [in, r] and [r, out]."""
    tensors: dict[str, Any] = {}
    for name, (a, b) in pairs.items():
        theirs = name.replace("model.", "llama.", 1)
        tensors[f"{theirs}.lora_A"] = np.ascontiguousarray(a.T)
        tensors[f"{theirs}.lora_B"] = np.ascontiguousarray(b.T)
    return tensors


def write_peft(
    folder: Path, tensors: Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT, **(changes or {})}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


def write_paddlenlp(
    folder: Path, files: Mapping[str, Mapping[str, Any]], changes: Mapping[str, Any] | None = None
) -> Path:
    """files: tensors by the name of their file, a pickle or safetensors."""
    import paddle

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lora_config.json").write_text(json.dumps({**PADDLENLP, **(changes or {})}))
    for name, tensors in files.items():
        if name.endswith(".safetensors"):
            save_file(dict(tensors), folder / name)
        else:
            state = {key: paddle.to_tensor(value) for key, value in tensors.items()}
            paddle.save(state, str(folder / name))
    return folder


def floats(folder: Path) -> dict[str, Array]:
    checkpoint = Checkpoint(folder)
    return {name: to_float32(checkpoint.read(name)) for name in checkpoint.tensors}


def merged_model(folder: Path, model: Path, changed: Mapping[str, Array]) -> Path:
    """The model in float32 with these tensors in place of its own, in another folder."""
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file({**floats(model), **changed}, folder / "model.safetensors")
    return folder


def with_products(
    pairs: Mapping[str, tuple[Array, Array]], scaling: float, seed: int = 0
) -> dict[str, Array]:
    """The tiny model's matrices with (scaling * B) @ A added, by the names of their tensors."""
    weights = tiny.tensors(tiny.CONFIG, seed)
    return {
        f"{name}.weight": weights[f"{name}.weight"] + (np.float32(scaling) * b) @ a
        for name, (a, b) in pairs.items()
    }
