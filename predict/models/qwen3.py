"""Qwen 3: Llama's shape with an RMS norm on each query and key head before the rotation."""

from typing import Any

from predict.models.qwen2 import windows
from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec


def attention_fields(config: ConfigReader) -> dict[str, Any]:
    """Fields of Qwen 3's attention blocks."""
    bias = config.get_bool("attention_bias", False)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    return {"qkv_bias": bias, "out_bias": bias, "qk_norm": norm}


def spec(config: ConfigReader) -> DecoderSpec:
    return llama_like(
        config,
        attention=attention_fields(config),
        windows=windows(config),
        head_dim=config.get_int("head_dim", 128),
    )
