"""MiniMax M2: Mixtral's names, a part of each head rotated, norms over all queries and all keys."""

from dataclasses import replace

from predict.models import mixtral
from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like, sparse_like
from predict.nn.spec import DecoderSpec

WEIGHTS = replace(mixtral.WEIGHTS, correction="block_sparse_moe.e_score_correction_bias")
UNREAD = (  # of layers that draft, and of MLPs and shared experts that no checkpoint has
    *("mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode"),
    "use_mtp",
)


def spec(config: ConfigReader) -> DecoderSpec:
    for key, allowed in (
        ("attention_bias", False),
        ("attn_type_list", [1] * config.get_int("num_hidden_layers")),  # 0: linear attention
        ("layernorm_full_attention_beta", 1.0),
        ("layernorm_linear_attention_beta", 1.0),
        ("layernorm_mlp_beta", 1.0),
        ("qk_norm_type", "per_layer"),
        ("shared_intermediate_size", 0),
        ("sliding_window", None),
    ):
        config.must_be(key, allowed)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    head_dim = config.get_int("head_dim", 128)
    rotary_dim = config.optional_int("rotary_dim")
    has_norm = config.get_bool("use_qk_norm", True)
    dense = llama_like(
        config,
        attention={"qk_norm": norm, "qk_norm_whole": True} if has_norm else {},
        head_dim=head_dim,
        norm=norm,
        partial=(rotary_dim or head_dim) / head_dim,
        theta=5000000.0,
    )
    if rotary_dim not in (None, *dense.rotary_dims) or dense.rotary_dims[0] > head_dim:
        raise config.wrong("rotary_dim", f"{head_dim} times partial_rotary_factor, at most 1")
    router = {
        "num_experts": config.get_int("num_experts", 256, aliases=("num_local_experts",)),
        "top_k": config.get_int("num_experts_per_tok", 8),
        "scoring": "sigmoid",
        "renormalize": True,
        "correction": config.get_bool("use_routing_bias", True),
    }
    return sparse_like(config, dense, router, config.get_int("intermediate_size"))
