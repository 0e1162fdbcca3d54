"""ERNIE 4.5's dense models: Llama's shape, rotated in neighbouring pairs."""

from predict.nn.blocks import Norm, Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("compression_ratio", 1.0)  # of positions
    config.must_be("use_rmsnorm", True)
    bias = config.get_bool("use_bias", False)
    return llama_like(
        config,
        attention={
            "qkv_bias": bias,
            "out_bias": bias,
            "positions": Positions(interleaved=True),
        },
        mlp={"up_bias": bias, "down_bias": bias},
        norm=Norm(epsilon=config.get_float("rms_norm_eps", 1e-5)),
        theta=500000.0,
        tied=True,
    )
