"""GLM-4 9B (2024) and GLM-Edge: Llama's shape, half of each head rotated in neighbouring pairs."""

from typing import Any

from predict.nn.blocks import Norm, Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(gate_up=("mlp.gate_up_proj",))


def glm_norm(config: ConfigReader) -> Norm:
    """The norm of both generations."""
    return Norm(epsilon=config.get_float("rms_norm_eps", 1.5625e-7))


def glm_like(config: ConfigReader, **mlp: Any) -> DecoderSpec:
    """The network of both generations. mlp: fields of both blocks that the later one adds."""
    attention = {
        "qkv_bias": config.get_bool("attention_bias", True),
        "positions": Positions(interleaved=True),
    }
    return llama_like(
        config,
        attention={**attention, **mlp},
        mlp=mlp,
        head_dim=config.get_int("head_dim", 128),
        norm=glm_norm(config),
        partial=0.5,
    )


def spec(config: ConfigReader) -> DecoderSpec:
    return glm_like(config)
