"""OLMo 2: Llama's shape with norms behind its blocks, and over all queries and all keys."""

from typing import Any

from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    attention_post_norm="post_attention_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
)


def olmo2_like(config: ConfigReader, whole: bool = True, **changes: Any) -> DecoderSpec:
    """The network with norms behind its blocks.

    whole: queries have one norm over all heads, and so have keys. changes: llama_like's arguments.
    """
    bias = config.get_bool("attention_bias", False)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-5))
    return llama_like(
        config,
        attention={
            "norm": None,
            "post_norm": norm,
            "qk_norm": norm,
            "qk_norm_whole": whole,
            "qkv_bias": bias,
            "out_bias": bias,
        },
        mlp={"norm": None, "post_norm": norm},
        norm=norm,
        **changes,
    )


def spec(config: ConfigReader) -> DecoderSpec:
    return olmo2_like(config)
