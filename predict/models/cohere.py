"""Command R: parallel blocks behind one LayerNorm without bias, rotated in neighbouring pairs."""

from predict.nn.blocks import Norm, Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(mlp_norm="input_layernorm.weight")


def spec(config: ConfigReader) -> DecoderSpec:
    has_qk_norm = config.get_bool("use_qk_norm", False)  # Command R+
    bias = config.get_bool("attention_bias", False)
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-5))
    scale = config.get_float("multiplier", 0.0625, aliases=("logit_scale",))
    return llama_like(
        config,
        attention={
            "qkv_bias": bias,
            "out_bias": bias,
            "positions": Positions(interleaved=True),
            **({"qk_norm": norm, "qk_norm_each": True} if has_qk_norm else {}),
        },
        mlp={"parallel": True},
        norm=norm,
        theta=500000.0,
        tied=True,
        head=HeadSpec(norm, scale=scale),
    )
