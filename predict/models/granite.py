"""Granite 3: Llama's shape with factors on embeddings, scores, blocks and logits."""

from predict.nn.blocks import Norm, Residual
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec


def spec(config: ConfigReader) -> DecoderSpec:
    def factor(name: str) -> float:
        return config.get_float("multiplier", 1.0, aliases=(name,))

    bias, mlp_bias = config.get_bool("attention_bias", False), config.get_bool("mlp_bias", False)
    residual = Residual(output_scale=factor("residual_multiplier"))
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    return llama_like(
        config,
        attention={
            "qkv_bias": bias,
            "out_bias": bias,
            "softmax_scale": factor("attention_multiplier"),
            "residual": residual,
        },
        mlp={"up_bias": mlp_bias, "down_bias": mlp_bias, "residual": residual},
        embedding=EmbeddingSpec(scale=factor("embedding_multiplier")),
        head=HeadSpec(norm, scale=1.0 / factor("logits_scaling")),
    )
