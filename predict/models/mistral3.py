"""Mistral Small 3.1 and later, Ministral 3: Mistral with Pixtral's tower for pictures of any shape.

A picture's tokens have the positions of text, with a token behind each row.
"""

from __future__ import annotations

from dataclasses import replace

from predict.images.longest import LongestPixels
from predict.images.pixels import Placeholder
from predict.models import ministral3, mistral
from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader
from predict.nn.hf_vision import BASES, layer_of, num_layers_of, theta_of, vision_config
from predict.nn.spec import DecoderSpec
from predict.nn.vision import Merger, Product, VisionSpec
from predict.nn.weights import WeightNames

FAMILIES = {"mistral": mistral, "ministral3": ministral3}  # of the text models
WEIGHTS = replace(mistral.WEIGHTS, beside_text=("vision_tower.", "multi_modal_projector."))
TOWER = WeightNames(
    layer="transformer.layers.{layer}.",
    attention_norm="attention_norm.weight",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out=("attention.o_proj",),
    mlp_norm="ffn_norm.weight",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down=("feed_forward.down_proj",),
)


def spec(config: ConfigReader) -> DecoderSpec:
    own = config.text_config()
    family = FAMILIES.get(own.get_str("model_type", "mistral"))
    if family is None:
        raise own.wrong("model_type", ", ".join(FAMILIES))
    text = replace(family.spec(own), model_type="mistral3")
    if config.values.get("vision_config") is None:
        return text
    epsilon = own.get_float("rms_norm_eps", 1e-5)
    return replace(text, vision=_vision(config, text, epsilon))


def _vision(config: ConfigReader, text: DecoderSpec, epsilon: float) -> VisionSpec:
    own = vision_config(config, "pixtral").with_defaults(
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        patch_size=16,
        image_size=1024,
    )
    width, longest = own.get_int("hidden_size"), own.get_int("image_size")
    norm, bias = Norm(epsilon=1e-5), config.get_bool("multimodal_projector_bias", False)
    between = Activation(config.activation("projector_hidden_act", "gelu"), gated=False)
    activation = Activation(own.activation(default="gelu"))
    layer = layer_of(own, width, norm, activation, Positions(), bias=False)
    return VisionSpec(
        model_type=text.model_type,
        hidden_size=width,
        layers=(layer,) * num_layers_of(config, own, -1),
        out_size=text.hidden_size,
        merger=Merger(
            Norm(epsilon=epsilon),
            (
                Product("patch_merger.merging_layer", width, False, channels_first=True),
                Product("linear_1", text.hidden_size, bias, between),
                Product("linear_2", text.hidden_size, bias),
            ),
            "norm.weight",
        ),
        names=TOWER,
        pixels=LongestPixels(
            patch_size=own.get_int("patch_size"),
            merge_size=config.get_int("spatial_merge_size", 2),
            max_height=longest,
            max_width=longest,
            layout="rows",
        ),
        placeholder=Placeholder(
            config.get_int("image_token_index", 10, aliases=("image_token_id",)),
            row_end=12,
            last=13,
            row_end_name="[IMG_BREAK]",
            last_name="[IMG_END]",
        ),
        can_be_left_out=True,
        theta=theta_of(own),
        turns_by_halves=True,
        patch_name="patch_conv",
        bases=BASES,
        first_norm=norm,
    )
