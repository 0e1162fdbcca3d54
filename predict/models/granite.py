"""Granite 3: Llama's shape with factors on embeddings, scores, blocks and logits."""

from predict.nn.blocks import Norm, Residual
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec


def _factor(config: ConfigReader, name: str) -> float:
    return config.get_float("multiplier", 1.0, aliases=(name,))


def residual(config: ConfigReader) -> Residual:
    """The sum of every block."""
    return Residual(output_scale=_factor(config, "residual_multiplier"))


def spec(config: ConfigReader) -> DecoderSpec:
    bias, mlp_bias = config.get_bool("attention_bias", False), config.get_bool("mlp_bias", False)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    return llama_like(
        config,
        attention={
            "qkv_bias": bias,
            "out_bias": bias,
            "softmax_scale": _factor(config, "attention_multiplier"),
            "residual": residual(config),
        },
        mlp={"up_bias": mlp_bias, "down_bias": mlp_bias, "residual": residual(config)},
        embedding=EmbeddingSpec(scale=_factor(config, "embedding_multiplier")),
        head=HeadSpec(norm, scale=1.0 / _factor(config, "logits_scaling")),
    )
