"""LLaVA: a text model of several families, with CLIP's tower, SigLIP's or Pixtral's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from predict.images.cropped import CroppedPixels
from predict.images.fixed import HALVES, FixedPixels
from predict.images.longest import LongestPixels
from predict.images.pixels import BICUBIC, Pixels, Placeholder
from predict.models import llama, mistral, qwen2, qwen3
from predict.nn.blocks import Activation
from predict.nn.hf_config import ConfigReader
from predict.nn.hf_towers import (
    DEFAULTS,
    clip,
    num_layers_of,
    pixtral,
    selects,
    siglip,
    text_family,
)
from predict.nn.hf_vision import vision_config
from predict.nn.spec import DecoderSpec
from predict.nn.vision import Merger, Product, VisionSpec
from predict.nn.weights import WeightNames

FAMILIES = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}
WEIGHTS = WeightNames(beside_text=("vision_tower.", "multi_modal_projector."))
UNREAD = (
    "projection_dim",
    "vocab_size",
    "vision_use_head",
    "image_seq_length",
    "tie_word_embeddings",
)


def spec(config: ConfigReader) -> DecoderSpec:
    own = config.text_config({"model_type": "llama", "vocab_size": 32000})
    own = own.with_defaults(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        max_position_embeddings=2048,
    )
    text = replace(text_family(own, FAMILIES, "llama").spec(own), model_type="llava")
    return replace(text, vision=_vision(config, text))


def _vision(config: ConfigReader, text: DecoderSpec) -> VisionSpec:
    own = vision_config(config, *DEFAULTS)
    kind = own.get_str("model_type", "clip_vision_model")
    own = own.with_defaults(**DEFAULTS[kind])
    own.values.get("model_type")
    num_layers = num_layers_of(config, own, -2)
    image, patch = own.get_int("image_size"), own.get_int("patch_size")
    shared: dict[str, Any] = {"patch_size": patch, "merge_size": 1, "layout": "text"}
    pixels: Pixels
    if kind == "clip_vision_model":
        selects(config, "default")
        tower = clip(own, num_layers)
        pixels = CroppedPixels(side=image, shortest_edge=image, **shared)
    elif kind == "siglip_vision_model":
        selects(config, "full")
        tower = siglip(own, num_layers, is_whole=False)
        pixels = FixedPixels(
            height=image,
            width=image,
            image_mean=HALVES,
            image_std=HALVES,
            resample=BICUBIC,
            **shared,
        )
    else:
        selects(config, "full")
        tower = pixtral(own, num_layers)
        shared["layout"] = "rows"
        pixels = LongestPixels(max_height=image, max_width=image, **shared)
    bias = config.get_bool("multimodal_projector_bias", True)
    between = Activation(config.activation("projector_hidden_act", "gelu"), gated=False)
    return VisionSpec(
        **tower,
        model_type=text.model_type,
        out_size=text.hidden_size,
        merger=Merger(
            None,
            (
                Product("linear_1", text.hidden_size, bias, between),
                Product("linear_2", text.hidden_size, bias),
            ),
        ),
        pixels=pixels,
        placeholder=Placeholder(
            config.get_int("image_token_index", 32000, aliases=("image_token_id",)),
            row_end=12,
            last=13,
            row_end_name="[IMG_BREAK]",
            last_name="[IMG_END]",
        ),
    )
