"""MiniCPM: Llama whose embeddings, blocks and last hidden states are scaled."""

import math

from predict.nn.blocks import Norm, Residual
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("num_experts", 0)  # those of MiniCPM-MoE
    config.must_be("sparse_config", None)  # that of MiniCPM4's sparse attention

    def factor(name: str, default: float) -> float:
        return config.get_float("multiplier", default, aliases=(name,))

    depth = math.sqrt(config.get_int("num_hidden_layers"))
    residual = Residual(output_scale=factor("scale_depth", 1.0) / depth)
    width = config.get_int("hidden_size")
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    bias = config.get_bool("attention_bias", False)
    return llama_like(
        config,
        attention={"qkv_bias": bias, "out_bias": bias, "residual": residual},
        mlp={"residual": residual},
        tied=True,
        embedding=EmbeddingSpec(scale=factor("scale_emb", 1.0)),
        head=HeadSpec(norm, scale=factor("dim_model_base", 1.0) / width),
    )
