"""Mistral Small 3.1 and later, Ministral 3: Mistral with Pixtral's tower for pictures of any shape.

A picture's tokens have the positions of text, with a token behind each row.
"""

from __future__ import annotations

from dataclasses import replace

from predict.images.longest import LongestPixels
from predict.images.pixels import Placeholder
from predict.models import ministral3, mistral
from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader
from predict.nn.hf_towers import DEFAULTS, num_layers_of, pixtral, text_family
from predict.nn.hf_vision import vision_config
from predict.nn.spec import DecoderSpec
from predict.nn.vision import Merger, Product, VisionSpec

FAMILIES = {"mistral": mistral, "ministral3": ministral3}  # of the text models
WEIGHTS = replace(mistral.WEIGHTS, beside_text=("vision_tower.", "multi_modal_projector."))


def spec(config: ConfigReader) -> DecoderSpec:
    own = config.text_config()
    text = replace(text_family(own, FAMILIES, "mistral").spec(own), model_type="mistral3")
    if config.values.get("vision_config") is None:
        return text
    epsilon = own.get_float("rms_norm_eps", 1e-5)
    return replace(text, vision=_vision(config, text, epsilon))


def _vision(config: ConfigReader, text: DecoderSpec, epsilon: float) -> VisionSpec:
    own = vision_config(config, "pixtral").with_defaults(**DEFAULTS["pixtral"])
    longest, bias = own.get_int("image_size"), config.get_bool("multimodal_projector_bias", False)
    between = Activation(config.activation("projector_hidden_act", "gelu"), gated=False)
    tower = pixtral(own, num_layers_of(config, own, -1))
    return VisionSpec(
        **tower,
        model_type=text.model_type,
        out_size=text.hidden_size,
        merger=Merger(
            Norm(epsilon=epsilon),
            (
                Product(
                    "patch_merger.merging_layer", tower["hidden_size"], False, channels_first=True
                ),
                Product("linear_1", text.hidden_size, bias, between),
                Product("linear_2", text.hidden_size, bias),
            ),
            "norm.weight",
        ),
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
    )
