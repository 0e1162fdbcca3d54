"""Hunyuan, dense: Llama's shape with norms of queries and keys behind the rotation."""

from dataclasses import replace

from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like, per_head
from predict.nn.spec import DecoderSpec, RopeSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    q_norm="self_attn.query_layernorm.weight", k_norm="self_attn.key_layernorm.weight"
)
UNREAD = (  # of other tasks, of Hunyuans with experts or eyes, and ids that nothing asks for
    *("add_classification_head", "cla_share_factor", "class_num", "dense_list", "pool_type"),
    *("im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "org_vocab_size", "pad_id"),
    *("text_end_id", "text_start_id"),
)


def spec(config: ConfigReader) -> DecoderSpec:
    for key, allowed in (
        ("mlp_bias", False),
        ("norm_type", "rms"),
        ("num_experts", 1),
        ("position_embedding_xdrope", False),
        ("use_cla", False),  # keys and values of another layer
        ("use_rotary_pos_emb", True),
    ):
        config.must_be(key, allowed)
    head_dim = config.optional_int("head_dim") or per_head(
        config, config.get_int("hidden_size"), config.get_int("num_attention_heads")
    )
    config.must_be("attention_head_dim", head_dim)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-5))
    has_norm = config.get_bool("use_qk_norm", True)
    bias = config.get_bool("attention_bias", False)
    return llama_like(
        config,
        attention={
            "qkv_bias": bias,
            "out_bias": bias,
            **({"qk_norm": norm, "qk_norm_last": True} if has_norm else {}),
        },
        head_dim=head_dim,
        norm=norm,
        ropes=(_rope(config, head_dim),),
    )


def _rope(config: ConfigReader, head_dim: int) -> RopeSpec:
    """What it calls dynamic has one base whatever the length, where there is an alpha."""
    rope = config.rope(head_dim, also={"alpha": "factor"})
    if rope.method != "dynamic" or config.parts[-1].values.get("alpha") is None:
        return rope
    theta = rope.theta * rope.factor ** (head_dim / (head_dim - 2))
    return replace(rope, method="default", theta=theta, factor=1.0)
