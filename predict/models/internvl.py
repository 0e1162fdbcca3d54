"""InternVL, as transformers has it: a text model of several families, pictures cut into tiles."""

from __future__ import annotations

from dataclasses import replace

from predict.images.pixels import Placeholder
from predict.images.tiles import TilePixels
from predict.models import llama, mistral, qwen2, qwen3, qwen3_moe
from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader
from predict.nn.hf_towers import BASES, layer_of, left_out, num_layers_of, selects, text_family
from predict.nn.hf_vision import vision_config
from predict.nn.spec import DecoderSpec
from predict.nn.vision import ClassToken, Learned, Merger, Product, VisionSpec
from predict.nn.weights import WeightNames

FAMILIES = {
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "llama": llama,
    "mistral": mistral,
}
WEIGHTS = WeightNames(beside_text=("vision_tower.", "multi_modal_projector."))
TOWER = WeightNames(
    layer="encoder.layer.{layer}.",
    attention_norm="layernorm_before.weight",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    q_norm="attention.q_norm.weight",
    k_norm="attention.k_norm.weight",
    out=("attention.projection_layer",),
    mlp_norm="layernorm_after.weight",
    gate_up=("mlp.fc1",),
    down=("mlp.fc2",),
)
UNREAD = ("layer_scale_init_value", "use_mask_token")  # of training
NORMS = {"layer_norm": "layer", "rms_norm": "rms"}


def spec(config: ConfigReader) -> DecoderSpec:
    own = config.text_config()
    text = replace(text_family(own, FAMILIES, "qwen2").spec(own), model_type="internvl")
    return replace(text, vision=_vision(config, text))


def _vision(config: ConfigReader, text: DecoderSpec) -> VisionSpec:
    own = vision_config(config).with_defaults(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
    )
    image, patch = _side(own, "image_size", 448), _side(own, "patch_size", 14)
    size, side = own.get_int("hidden_size"), image // patch
    selects(config, "default")
    ratio = config.get_float("downsample_ratio", 0.5)
    merge = round(1 / ratio)
    if merge * ratio != 1 or side % merge:
        raise config.wrong("downsample_ratio", f"1 over a number that divides {side} patches")
    config.must_be("image_seq_length", (side // merge) ** 2, 256)
    own.must_be("use_mask_token", False)
    own.must_be("use_absolute_position_embeddings", True)
    num_layers = num_layers_of(config, own, -1)
    has_norm = not own.get_bool("use_mean_pooling", True)
    is_last = num_layers == own.get_int("num_hidden_layers")
    last = Norm("layer", own.get_float("layer_norm_eps", 1e-6), bias=True)
    between = Activation(config.activation("projector_hidden_act", "gelu"), gated=False)
    return VisionSpec(
        model_type=text.model_type,
        hidden_size=size,
        layers=(_layer(own, size),) * num_layers,
        out_size=text.hidden_size,
        merger=Merger(
            Norm("layer", 1e-5, bias=True),
            (
                Product("linear_1", text.hidden_size, activation=between),
                Product("linear_2", text.hidden_size),
            ),
            "layer_norm.weight",
            norms_cells=True,
        ),
        names=TOWER,
        pixels=TilePixels(
            patch_size=patch, merge_size=merge, height=image, width=image, layout="text"
        ),
        placeholder=Placeholder(
            config.get_int("image_token_id", 151667),
            around_names=("<img>", "</img>"),
        ),
        patch_name="embeddings.patch_embeddings.projection",
        patch_bias=True,
        class_token=ClassToken("embeddings.cls_token", (1, 1, size)),
        layer_scales=("lambda_1", "lambda_2"),
        learned=Learned("embeddings.position_embeddings", side, leading=(1,)),
        bases=BASES,
        last_norm=last if has_norm and is_last else None,
        last_norm_name="layernorm.weight",
        ignored=(
            *left_out(own, TOWER, num_layers),
            *(("vision_tower.layernorm.",) if has_norm and not is_last else ()),
        ),
    )


def _layer(own: ConfigReader, size: int) -> tuple:  # type: ignore[type-arg]
    kind = own.get_str("norm_type", "layer_norm")
    if kind not in NORMS:
        raise own.wrong("norm_type", ", ".join(NORMS))
    epsilon = own.get_float("layer_norm_eps", 1e-6)
    norm = Norm(NORMS[kind], epsilon, bias=kind == "layer_norm")  # type: ignore[arg-type]
    has_norms = own.get_bool("use_qk_norm", False)
    return layer_of(
        *(own, size, norm, Activation(own.activation(default="gelu"), gated=False)),
        Positions("none"),
        qkv_bias=own.get_bool("attention_bias", False),
        qk_norm=Norm(epsilon=1e-6) if has_norms else None,
        qk_norm_whole=has_norms,
    )


def _side(own: ConfigReader, key: str, default: int) -> int:
    """One side of two that are the same, which may stand in a list."""
    value = own.values.get(key)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise own.wrong(key, "a number, or the same one twice")
        own = own.with_values(**{key: value[0]})
    return own.get_int(key, default)
