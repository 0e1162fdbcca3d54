"""Seed-OSS: Llama's shape with biases on queries, keys and values, and a head_dim of its own."""

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec


def spec(config: ConfigReader) -> DecoderSpec:
    mlp_bias = config.get_bool("mlp_bias", False)
    return llama_like(
        config,
        attention={
            "qkv_bias": config.get_bool("attention_bias", True),
            "out_bias": config.get_bool("attention_out_bias", False),
        },
        mlp={"up_bias": mlp_bias, "down_bias": mlp_bias},
        head_dim=config.get_int("head_dim", 128),
    )
