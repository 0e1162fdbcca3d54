"""ERNIE 4.5's dense models: Llama's shape, rotated in neighbouring pairs."""

from predict.nn.blocks import Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    bias = config.get_bool("use_bias", False)
    return llama_like(
        config,
        attention={
            "qkv_bias": bias,
            "out_bias": bias,
            "positions": Positions(interleaved=True),
        },
        mlp={"up_bias": bias, "down_bias": bias},
        theta=500000.0,
        tied=True,
    )
