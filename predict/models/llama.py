"""Llama 1, 2, 3, 3.1-3.3, and checkpoints stored in its shape."""

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    attention_bias = config.get_bool("attention_bias", False)
    return llama_like(
        config,
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        mlp_bias=config.get_bool("mlp_bias", False),
    )
