"""Gemma: Llama's shape with tanh-GELU, scaled embeddings, and norms whose factor is 1 + weight."""

from typing import Any

from predict.nn.blocks import Function, Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, EmbeddingSpec


def gemma_norm(config: ConfigReader) -> Norm:
    """The norm of all Gemmas."""
    return Norm(epsilon=config.get_float("rms_norm_eps", 1e-6), plus_one=True)


def gemma_activation(config: ConfigReader) -> Function:
    """The function of all Gemmas' MLPs."""
    if config.values.get("hidden_activation") is not None:
        return config.activation("hidden_activation")
    # The first ones' config.json says "gelu" of what they were trained with tanh-GELU.
    is_first = config.get_str("hidden_act", "gelu") == "gelu"
    return "gelu_tanh" if is_first else config.activation()


def gemma_like(config: ConfigReader, **changes: Any) -> DecoderSpec:
    """`llama_like` with what all Gemmas share."""
    config.must_be("alibi", False)  # which PaddleNLP's Gemma has a field for
    if not changes.get("attention", {}).get("prefix_mask"):
        config.must_be("use_bidirectional_attention", False)
    return llama_like(
        config,
        norm=gemma_norm(config),
        activation=gemma_activation(config),
        head_dim=config.get_int("head_dim", 256),
        embedding=EmbeddingSpec(scale=config.get_int("hidden_size") ** 0.5),
        tied=True,
        **changes,
    )


def spec(config: ConfigReader) -> DecoderSpec:
    bias = config.get_bool("attention_bias", False)
    return gemma_like(config, attention={"qkv_bias": bias, "out_bias": bias})
