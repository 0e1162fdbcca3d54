"""Phi-3.5-MoE: Mixtral's names, LayerNorm, biases, and two experts by the sparse mixer."""

from predict.models.mixtral import WEIGHTS
from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like, per_head, sparse_like
from predict.nn.spec import DecoderSpec, HeadSpec

__all__ = ("UNREAD", "WEIGHTS", "spec")
UNREAD = ("input_jitter_noise",)  # of training
MSCALES = {"short_mscale": "short_attention_factor", "long_mscale": "long_attention_factor"}


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("num_experts_per_tok", 2)
    norm = Norm("layer", config.get_float("rms_norm_eps", 1e-5), True)
    head_dim = config.optional_int("head_dim") or per_head(
        config, config.get_int("hidden_size"), config.get_int("num_attention_heads")
    )
    bias = config.get_bool("attention_bias", False)
    rope = config.rope(head_dim, theta=1e6, also=MSCALES)
    factors = (rope.short_attention_factor, rope.long_attention_factor)
    has_factors = rope.attention_factor is not None or None not in factors
    if rope.method != "default" and not (rope.method == "longrope" and has_factors):
        raise config.wrong("rope_scaling", "longrope with short_mscale and long_mscale, null")
    dense = llama_like(
        config,
        attention={"qkv_bias": bias, "out_bias": bias},
        windows=config.windows(),
        head_dim=head_dim,
        norm=norm,
        ropes=(rope,),
        head=HeadSpec(norm, bias=config.get_bool("lm_head_bias", False)),
    )
    router = {
        "num_experts": config.get_int("num_experts", 16, aliases=("num_local_experts",)),
        "top_k": 2,
        "scoring": "sparse_mixer",
        "jitter": config.get_float("router_jitter_noise", 0.01),
    }
    return sparse_like(config, dense, router, config.get_int("intermediate_size"))
