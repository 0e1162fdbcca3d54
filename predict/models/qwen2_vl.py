"""Qwen 2 VL: Qwen 2 with a tower that sees pictures whole, and positions as Qwen 2.5 VL's."""

from __future__ import annotations

from dataclasses import replace

from predict.models import qwen2_5_vl
from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader
from predict.nn.hf_vision import axes_of, qwen_like, vision_config
from predict.nn.spec import DecoderSpec

WEIGHTS = qwen2_5_vl.WEIGHTS
TOWER = replace(qwen2_5_vl.TOWER, gate_up=("mlp.fc1",), down=("mlp.fc2",))
UNREAD = ("spatial_patch_size",)  # patch_size


def spec(config: ConfigReader) -> DecoderSpec:
    text, sections = qwen2_5_vl.text_spec(config)
    own = vision_config(config)
    own.must_be("hidden_size", text.hidden_size, 3584)
    own.must_be("hidden_act", "quick_gelu")
    size = own.get_int("embed_dim", 1280)
    vision = qwen_like(
        *(config, own, text, axes_of(config, text, sections)),
        size=size,
        inner=size * own.get_int("mlp_ratio", 4),
        norm=Norm("layer", 1e-6, bias=True),
        activation=Activation("silu", gated=False),
        names=TOWER,
        slope=1.702,
    )
    return replace(text, vision=vision)
