"""Towers that several families have beside a projector: CLIP's, SigLIP's, Pixtral's.

Each is the fields of VisionSpec that its config says.
"""

from __future__ import annotations

from typing import Any

from predict.nn.blocks import Activation, Block, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, per_head
from predict.nn.hf_vision import theta_of
from predict.nn.vision import Base, ClassToken, Learned
from predict.nn.weights import WeightNames

# What names begin with, longest first.
BASES = tuple(
    Base(f"{root}vision_tower.{inner}", f"{root}multi_modal_projector.")
    for root in ("model.", "")
    for inner in ("vision_model.", "")
)
# Names of CLIP's layers, and of SigLIP's.
CLIP = WeightNames(
    layer="encoder.layers.{layer}.",
    attention_norm="layer_norm1.weight",
    out=("self_attn.out_proj",),
    mlp_norm="layer_norm2.weight",
    gate_up=("mlp.fc1",),
    down=("mlp.fc2",),
)
PIXTRAL = WeightNames(
    layer="transformer.layers.{layer}.",
    attention_norm="attention_norm.weight",
    qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    out=("attention.o_proj",),
    mlp_norm="ffn_norm.weight",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down=("feed_forward.down_proj",),
)
QUICK_GELU = 1.702  # x * sigmoid(1.702 x), folded into the products around it


def layer_of(
    own: ConfigReader,
    size: int,
    norm: Norm,
    activation: Activation,
    positions: Positions,
    bias: bool = True,
    **attention: Any,
) -> tuple[Block, ...]:
    """A layer of a tower whose config has transformers' names of heads and sizes.

    size: the width. bias: of all matrices. attention: fields of its attention.
    """
    heads = own.get_int("num_attention_heads", 16)
    head_dim = per_head(own, size, heads)
    own.must_be("head_dim", head_dim)
    return blocks_of(
        (heads, heads, head_dim),
        own.get_int("intermediate_size"),
        activation,
        bias,
        attention={"positions": positions, "prefix_mask": True, **attention},
        norm=norm,
    )


def num_layers_of(config: ConfigReader, own: ConfigReader, default: int) -> int:
    """Layers of a tower that are run: up to the one that vision_feature_layer names.

    own: the tower's config. default: where the file says none. Raises UserError for a list of
    several, whose features would be joined.
    """
    count, key = own.get_int("num_hidden_layers"), "vision_feature_layer"
    said = config.values.get(key)
    found = default if said is None else said
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if type(found) is not int or not -count <= found <= count or found == 0:
        raise config.wrong(key, f"one number from {-count} to {count}, not 0")
    return found if found > 0 else count + 1 + found


def left_out(own: ConfigReader, names: WeightNames, num_layers: int) -> tuple[str, ...]:
    """Names of the tensors of layers that are not run."""
    count = own.get_int("num_hidden_layers")
    return tuple(names.layer.format(layer=index) for index in range(num_layers, count))


def siglip(own: ConfigReader, num_layers: int, is_whole: bool = True) -> dict[str, Any]:
    """SigLIP's: learned positions.

    num_layers: those that are run. is_whole: whether the last norm is.
    """
    size, norm = own.get_int("hidden_size"), _norm(own, 1e-6)
    activation = Activation(own.activation(default="gelu_pytorch_tanh"), gated=False)
    side = own.get_int("image_size") // own.get_int("patch_size")
    return {
        "hidden_size": size,
        "layers": (layer_of(own, size, norm, activation, Positions("none")),) * num_layers,
        "names": CLIP,
        "patch_name": "embeddings.patch_embedding",
        "patch_bias": True,
        "learned": Learned("embeddings.position_embedding.weight", side),
        "bases": BASES,
        "last_norm": norm if is_whole else None,
        "ignored": (
            *("vision_tower.head.", "vision_model.head."),
            *left_out(own, CLIP, num_layers),
            *(() if is_whole else ("post_layernorm.",)),
        ),
    }


def clip(own: ConfigReader, num_layers: int) -> dict[str, Any]:
    """CLIP's: a class token, learned positions, a norm ahead; the last norm is not run."""
    size, norm = own.get_int("hidden_size"), _norm(own, 1e-5)
    is_quick = own.get_str("hidden_act", "quick_gelu") == "quick_gelu"
    function = "silu" if is_quick else own.activation()
    layer = layer_of(own, size, norm, Activation(function, gated=False), Positions("none"))
    side = own.get_int("image_size") // own.get_int("patch_size")
    return {
        "hidden_size": size,
        "layers": (layer,) * num_layers,
        "names": CLIP,
        "slope": QUICK_GELU if is_quick else 1.0,
        "patch_name": "embeddings.patch_embedding",
        "class_token": ClassToken("embeddings.class_embedding", (size,)),
        "learned": Learned("embeddings.position_embedding.weight", side),
        "bases": BASES,
        "first_norm": norm,
        "first_norm_name": "pre_layrnorm.weight",
        "ignored": ("post_layernorm.", "position_ids", *left_out(own, CLIP, num_layers)),
    }


def pixtral(own: ConfigReader, num_layers: int) -> dict[str, Any]:
    """Pixtral's: positions turn, no biases, a norm ahead."""
    size, norm = own.get_int("hidden_size"), Norm(epsilon=1e-5)
    activation = Activation(own.activation(default="gelu"))
    layer = layer_of(own, size, norm, activation, Positions(), bias=False)
    return {
        "hidden_size": size,
        "layers": (layer,) * num_layers,
        "names": PIXTRAL,
        "theta": theta_of(own),
        "turns_by_halves": True,
        "patch_name": "patch_conv",
        "bases": BASES,
        "first_norm": norm,
        "ignored": left_out(own, PIXTRAL, num_layers),
    }


# What configs of towers leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "siglip_vision_model": {
        "image_size": 224,
        "patch_size": 16,
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "clip_vision_model": {
        "image_size": 336,
        "patch_size": 14,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
    "pixtral": {
        "image_size": 1024,
        "patch_size": 16,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
    },
}


def selects(config: ConfigReader, strategy: str) -> None:
    """Raises UserError unless vision_feature_select_strategy takes a tower's patches, and all."""
    key = "vision_feature_select_strategy"
    if config.get_str(key, "default") != strategy:
        raise config.wrong(key, f"{strategy} with this tower")


def _norm(own: ConfigReader, epsilon: float) -> Norm:
    return Norm("layer", own.get_float("layer_norm_eps", epsilon), bias=True)


def text_family(own: ConfigReader, families: dict[str, Any], default: str) -> Any:
    """The family of a text model. Raises UserError where it is none of these."""
    family = families.get(own.get_str("model_type", default))
    if family is None:
        raise own.wrong("model_type", ", ".join(families))
    return family
