"""Llama 1, 2, 3, 3.1-3.3, and checkpoints stored in its shape: Baichuan's by PaddleNLP's way."""

from typing import Any

from predict.nn.blocks import Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    attention_bias = config.get_bool("attention_bias", False)
    mlp_bias = config.get_bool("mlp_bias", False)
    alibi = config.get_bool("alibi", False)  # of Baichuan 13B, which PaddleNLP stores as a Llama
    positions: dict[str, Any] = {"positions": Positions("alibi")} if alibi else {}
    changes: dict[str, Any] = {"ropes": ()} if alibi else {}
    return llama_like(
        config,
        attention={"qkv_bias": attention_bias, "out_bias": attention_bias, **positions},
        mlp={"up_bias": mlp_bias, "down_bias": mlp_bias},
        **changes,
    )
