"""OLMoE: Llama's shape with norms over all queries and all keys, and experts alone."""

from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like, sparse_like
from predict.nn.spec import DecoderSpec


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("clip_qkv", None)
    config.must_be("sliding_window", None)
    bias = config.get_bool("attention_bias", False)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-5))
    dense = llama_like(
        config,
        attention={"qk_norm": norm, "qk_norm_whole": True, "qkv_bias": bias, "out_bias": bias},
        norm=norm,
    )
    router = {
        "num_experts": config.get_int("num_experts", 64, aliases=("num_local_experts",)),
        "top_k": config.get_int("num_experts_per_tok", 8),
        "renormalize": config.get_bool("norm_topk_prob", False),
    }
    return sparse_like(config, dense, router, config.get_int("intermediate_size"))
