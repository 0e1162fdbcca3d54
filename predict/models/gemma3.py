"""Gemma 3 with its eyes: gemma3_text, and SigLIP's tower for pictures of one size.

Tokens of one picture see each other.
"""

from __future__ import annotations

from dataclasses import replace

from predict.images.fixed import BILINEAR, HALVES, FixedPixels
from predict.images.pixels import Placeholder
from predict.models import gemma3_text
from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader
from predict.nn.hf_towers import DEFAULTS as DEFAULTS_OF_TOWERS
from predict.nn.hf_towers import siglip
from predict.nn.hf_vision import square_root, vision_config
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.spec import DecoderSpec
from predict.nn.vision import Merger, Product, VisionSpec

WEIGHTS = replace(gemma3_text.WEIGHTS, beside_text=("vision_tower.", "multi_modal_projector."))
UNREAD = ("vision_use_head",)
# The published ones say of their text models only what differs from these.
DEFAULTS = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def spec(config: ConfigReader) -> DecoderSpec:
    own = config.text_config(DEFAULTS)
    own.must_be("model_type", "gemma3_text")
    text = replace(gemma3_text.spec(own), model_type="gemma3")
    if config.values.get("vision_config") is None:
        return text
    return replace(text, vision=_vision(config, text))


def _vision(config: ConfigReader, text: DecoderSpec) -> VisionSpec:
    kind = "siglip_vision_model"
    own = vision_config(config, kind).with_defaults(**DEFAULTS_OF_TOWERS[kind])
    image, patch = own.get_int("image_size"), own.get_int("patch_size")
    side, tokens = image // patch, square_root(config, "mm_tokens_per_image", 256)
    if side % tokens:
        raise config.wrong("mm_tokens_per_image", f"a square whose side divides {side} patches")
    windows = [each.window for each in text.blocks_of(AttentionBlock) if each.window >= 0]
    if windows and min(windows) < tokens**2:
        raise config.wrong(
            "mm_tokens_per_image", f"at most the {min(windows)} tokens of sliding_window"
        )
    return VisionSpec(
        **siglip(own, own.get_int("num_hidden_layers")),
        model_type=text.model_type,
        out_size=text.hidden_size,
        merger=Merger(
            Norm(epsilon=own.get_float("layer_norm_eps", 1e-6), plus_one=True),
            (Product("mm_input_projection_weight", text.hidden_size, False, is_parameter=True),),
            "mm_soft_emb_norm.weight",
            norms_cells=True,
            pools=True,
        ),
        pixels=FixedPixels(
            patch_size=patch,
            merge_size=side // tokens,
            height=image,
            width=image,
            resample=BILINEAR,
            image_mean=HALVES,
            image_std=HALVES,
            layout="text",
        ),
        placeholder=Placeholder(
            config.get_int("image_token_index", 262144, aliases=("image_token_id",)),
            mark=config.get_int("boi_token_index", 255999),
            end=config.get_int("eoi_token_index", 256000),
        ),
        can_be_left_out=True,
        sees_itself=True,
    )
