"""GLM-4.5 and later: half of each head rotated, groups of experts behind some dense layers."""

from predict.models.deepseek_v3 import noaux_router, weights
from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like, sparse_like
from predict.nn.spec import DecoderSpec

__all__ = ("spec", "weights")


def spec(config: ConfigReader) -> DecoderSpec:
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-5))
    dense = llama_like(
        config,
        attention={
            "qkv_bias": config.get_bool("attention_bias", False),
            "qk_norm": norm if config.get_bool("use_qk_norm", False) else None,
        },
        norm=norm,
        partial=0.5,
    )
    inner = config.get_int("moe_intermediate_size", 1408)
    shared = inner * config.get_int("n_shared_experts", 1)
    first = config.get_int("first_k_dense_replace", 1)
    router = noaux_router(config, num_experts=128, scale=1.0, num_groups=1, top_groups=1)
    return sparse_like(
        config, dense, router, inner, lambda index: index >= first, shared_size=shared
    )
