"""Llama 1, 2, 3, 3.1-3.3, and checkpoints stored in its shape."""

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    attention_bias = config.get_bool("attention_bias", False)
    mlp_bias = config.get_bool("mlp_bias", False)
    return llama_like(
        config,
        attention={"qkv_bias": attention_bias, "out_bias": attention_bias},
        mlp={"up_bias": mlp_bias, "down_bias": mlp_bias},
    )
