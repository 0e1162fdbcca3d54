"""PaddleOCR-VL: ERNIE 4.5's shape, rotated in halves; SigLIP's tower for pages of any shape."""

from __future__ import annotations

from dataclasses import replace

from predict.images.areas import AreaPixels
from predict.images.pixels import Placeholder
from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.hf_towers import CLIP, layer_of
from predict.nn.hf_vision import axes_of, merger_of, text_of, theta_of, vision_config
from predict.nn.spec import DecoderSpec
from predict.nn.vision import Base, Learned, VisionSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(beside_text=("visual.", "mlp_AR.", "model.projector."))
UNREAD = ("temporal_patch_size", "tokens_per_second")  # of films
BASES = (
    Base("visual.vision_model.", "mlp_AR."),
    Base("model.visual.vision_model.", "model.projector."),
)


def spec(config: ConfigReader) -> DecoderSpec:
    own, sections = text_of(config)
    own = own.with_defaults(rms_norm_eps=1e-5, rope_theta=5e5)
    config.must_be("rope_is_neox_style", True)
    config.must_be("use_3d_rope", True)
    bias = own.get_bool("use_bias", False)
    text = llama_like(
        own,
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp={"up_bias": bias, "down_bias": bias},
        head_dim=own.get_int("head_dim", 128),
        model_type=config.get_str("model_type"),
    )
    return replace(text, vision=_vision(config, text, axes_of(config, text, sections)))


def _vision(config: ConfigReader, text: DecoderSpec, axes: tuple[int, ...]) -> VisionSpec:
    own = vision_config(config).with_defaults(intermediate_size=4304, num_hidden_layers=27)
    size, merge = own.get_int("hidden_size", 1152), own.get_int("spatial_merge_size", 2)
    patch, norm = (
        own.get_int("patch_size", 14),
        Norm("layer", own.get_float("layer_norm_eps", 1e-6), True),
    )
    activation = Activation(own.activation(default="gelu_pytorch_tanh"), gated=False)
    between = Norm("layer", 1e-5, bias=True)
    parts = ("pre_norm.weight", "linear_1", "linear_2")
    return VisionSpec(
        model_type=text.model_type,
        hidden_size=size,
        layers=(layer_of(own, size, norm, activation, Positions()),)
        * own.get_int("num_hidden_layers"),
        out_size=text.hidden_size,
        merger=merger_of(parts, between, size * merge**2, text.hidden_size),
        names=CLIP,
        pixels=AreaPixels(
            patch_size=patch,
            merge_size=merge,
            temporal_patch_size=1,
            min_pixels=384 * 384,
            max_pixels=1536 * 1536,
            grows_sides=True,
        ),
        placeholder=Placeholder(config.get_int("image_token_id", 100295)),
        axes=axes,
        theta=theta_of(own),
        patch_name="embeddings.patch_embedding",
        patch_bias=True,
        learned=Learned(
            "embeddings.position_embedding.weight",
            own.get_int("image_size", 384) // patch,
        ),
        bases=BASES,
        last_norm=norm,
        ignored=("packing_position_embedding", "vision_model.head."),
    )
