"""Qwen 3: Llama's shape with an RMS norm on each query and key head before the rotation."""

from predict.models.qwen2 import windows
from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    attention_bias = config.get_bool("attention_bias", False)
    return llama_like(
        config,
        attention={
            "qkv_bias": attention_bias,
            "out_bias": attention_bias,
            "qk_norm": Norm(epsilon=config.get_float("rms_norm_eps", 1e-6)),
        },
        windows=windows(config),
        head_dim=config.get_int("head_dim", 128),
    )
