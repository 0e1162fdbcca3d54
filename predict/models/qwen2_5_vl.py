"""Qwen 2.5 VL: Qwen 2.5 with a tower of windows, and positions in time, rows and columns."""

from __future__ import annotations

from dataclasses import replace

from predict.models import qwen2
from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.hf_vision import axes_of, qwen_like, text_of, vision_config
from predict.nn.spec import DecoderSpec
from predict.nn.vision import VisionSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(beside_text=("visual.",))
TOWER = WeightNames(
    layer="blocks.{layer}.",
    attention_norm="norm1.weight",
    qkv=("attn.qkv",),
    out=("attn.proj",),
    mlp_norm="norm2.weight",
)
UNREAD = ("tokens_per_second", "spatial_patch_size")  # of films; patch_size


def text_spec(config: ConfigReader) -> tuple[DecoderSpec, tuple[int, ...]]:
    """The text model of Qwen 2 VL and 2.5 VL, and the sections of its positions."""
    text, sections = text_of(config)
    text = text.with_defaults(rms_norm_eps=1e-5)
    name = config.get_str("model_type")
    bias = {"qkv_bias": True}
    made = llama_like(text, bias, windows=qwen2.windows(text), theta=1e6, model_type=name)
    return made, sections


def spec(config: ConfigReader) -> DecoderSpec:
    text, sections = text_spec(config)
    return replace(text, vision=_vision(config, text, sections))


def _vision(config: ConfigReader, text: DecoderSpec, sections: tuple[int, ...]) -> VisionSpec:
    own = vision_config(config)
    own.must_be("out_hidden_size", text.hidden_size, 3584)
    cell = own.get_int("spatial_merge_size", 2) * own.get_int("patch_size", 14)
    whole: tuple[int, ...] = (7, 15, 23, 31)
    if own.values.get("fullatt_block_indexes") is not None:  # [] too: windows alone
        whole = own.get_ints("fullatt_block_indexes", own.get_int("depth", 32))
    return qwen_like(
        *(config, own, text, axes_of(config, text, sections)),
        size=own.get_int("hidden_size", 3584),
        inner=own.get_int("intermediate_size", 3420),
        norm=Norm(),
        activation=Activation(own.activation()),
        names=TOWER,
        window=max(own.get_int("window_size", 112) // cell, 1),
        whole_layers=frozenset(whole),
    )
