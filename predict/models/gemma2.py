"""Gemma 2: Gemma with norms on both sides, soft caps, and a window in every other layer."""

from typing import Any

from predict.models.gemma import gemma_like, gemma_norm
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    attention_post_norm="post_attention_layernorm.weight",
    mlp_norm="pre_feedforward_layernorm.weight",
    mlp_post_norm="post_feedforward_layernorm.weight",
)


def softcap_of(config: ConfigReader, key: str, default: float) -> float:
    """The soft cap under the key; 0, which caps nothing, for null. default: where it is absent."""
    return config.get_float("softcap", 0.0 if key in config.values else default, aliases=(key,))


def attention_fields(config: ConfigReader, softcap: float = 0.0) -> dict[str, Any]:
    """Fields of Gemma 2's and 3's attention blocks. softcap: where config.json does not say."""
    bias = config.get_bool("attention_bias", False)
    return {
        "qkv_bias": bias,
        "out_bias": bias,
        "softmax_scale": config.get_float("multiplier", 256, ("query_pre_attn_scalar",)) ** -0.5,
        "softcap": softcap_of(config, "attn_logit_softcapping", softcap),
        "post_norm": gemma_norm(config),
    }


def head_of(config: ConfigReader, softcap: float = 0.0) -> HeadSpec:
    """Gemma 2's and 3's way to logits; softcap likewise."""
    softcap = softcap_of(config, "final_logit_softcapping", softcap)
    return HeadSpec(gemma_norm(config), softcap=softcap)


def spec(config: ConfigReader) -> DecoderSpec:
    return gemma_like(
        config,
        attention=attention_fields(config, softcap=50.0),
        mlp={"post_norm": gemma_norm(config)},
        windows=config.layer_windows(
            config.get_int("sliding_window", 4096), lambda index: index % 2 == 0
        ),
        head=head_of(config, softcap=30.0),
    )
