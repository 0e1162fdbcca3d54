"""What a checkpoint's network cannot do is refused when it is opened, and named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from export.export_model import export_model
from predict import LLM
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.model import read_spec
from predict.loading.safetensors_writer import write
from tests.support.golden import GOLDEN, config


def changed(case: str, folder: Path, **changes: Any) -> Path:
    """A copy of a golden checkpoint with other values in its config.json; None takes one out."""
    shutil.copytree(GOLDEN / case, folder)
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder


@pytest.mark.parametrize(("case", "positions"), [("gpt2_small", 144), ("opt_125m", 256)])
def test_no_request_may_be_longer_than_the_learned_positions(
    case: str, positions: int, tmp_path: Path
) -> None:
    LLM(config(case, max_length=positions))
    message = f"max_length is {positions + 1}.* {positions} tokens.*--max_length {positions} or"
    with pytest.raises(UserError, match=message):
        LLM(config(case, max_length=positions + 1))
    with pytest.raises(UserError, match=message):
        export_model(config(case, max_length=positions + 1), tmp_path / "export")


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("minicpm_2b", {"num_experts": 8}),
        ("minicpm_2b", {"sparse_config": {"topk": 64}}),
        ("baichuan_7b", {"tie_word_embeddings": True}),
        ("chatglm_2_6b", {"rmsnorm": False}),
        ("chatglm_2_6b", {"post_layer_norm": False}),
        ("chatglm_2_6b", {"original_rope": False}),
        ("chatglm_2_6b", {"pre_seq_len": 128}),
        ("chatglm_2_6b", {"quantization_bit": 4}),
        ("qwen_7b", {"no_bias": False}),
        ("qwen_7b", {"rotary_pct": 0.5}),
        ("qwen_7b", {"intermediate_size": 81}),
        ("phi_2", {"qk_layernorm": True}),
        ("phi_2", {"tie_word_embeddings": True}),
        ("gpt2_small", {"scale_attn_weights": False}),
        ("opt_125m", {"layer_norm_elementwise_affine": False}),
    ],
)
def test_config_that_asks_for_what_the_family_does_not_do_is_refused(
    case: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    (key,) = changes
    with pytest.raises(UserError, match=f"'{key}' is "):
        read_spec(changed(case, tmp_path / "model", **changes))


@pytest.mark.parametrize(
    "scaling",
    [
        {"short_factor": None},
        {"short_factor": [1.0] * 7},
        {"long_factor": [1.0] * 7 + [-1.0]},
        {"long_factor": 2.0},
        {"short_mscale": 1.1},
    ],
)
def test_longrope_with_factors_of_another_kind_is_refused(
    scaling: dict[str, Any], tmp_path: Path
) -> None:
    (key,) = scaling
    given = json.loads((GOLDEN / "phi3_longrope" / "config.json").read_text())["rope_scaling"]
    folder = changed("phi3_longrope", tmp_path / "model", rope_scaling={**given, **scaling})
    with pytest.raises(UserError, match=f"rope_scaling: '{key}'|lacks '{key}'"):
        read_spec(folder)


@pytest.mark.parametrize(
    ("case", "linear"),
    [("gpt2_small", "attn.c_attn"), ("internlm2_7b", "attention.wqkv")],
)
def test_quantized_matrix_that_is_stored_otherwise_is_refused(
    case: str, linear: str, tmp_path: Path
) -> None:
    quantized = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": False}
    folder = changed(case, tmp_path / "model", quantization_config=quantized)
    checkpoint = Checkpoint(folder)
    tensors = {name: ("F32", to_float32(checkpoint.read(name))) for name in checkpoint.tensors}
    for name in [name for name in tensors if name.endswith(f"{linear}.weight")]:
        del tensors[name]
        tensors[name.replace(".weight", ".qweight")] = ("I32", np.zeros((4, 96), np.int32))
    write(folder / "model.safetensors", tensors)
    with pytest.raises(UserError, match=rf"{linear} is quantized.* in another order"):
        LLM(config(folder, max_length=64))
