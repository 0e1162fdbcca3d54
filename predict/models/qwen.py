"""Qwen, the first: Llama under other names, made for longer prompts than it was trained on."""

from dataclasses import replace

from predict.nn.blocks import Norm, Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, RopeSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    embedding="transformer.wte.weight",
    layer="transformer.h.{layer}.",
    attention_norm="ln_1.weight",
    qkv=("attn.c_attn",),
    out=("attn.c_proj",),
    mlp_norm="ln_2.weight",
    gate_up=("mlp.w2", "mlp.w1"),
    down=("mlp.c_proj",),
    final_norm="transformer.ln_f.weight",
    ignored=("rotary_emb.inv_freq", "attn.masked_bias"),
)
QUERIES = 1  # of the rotary tables


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("no_bias", True)
    config.must_be("scale_attn_weights", True)
    config.must_be("rotary_pct", 1.0)
    num_heads, inner = config.get_int("num_attention_heads"), config.get_int("intermediate_size")
    hidden_size = config.get_int("hidden_size")
    head_dim = config.get_int("head_dim", hidden_size // num_heads, aliases=("kv_channels",))
    if inner % 2:
        raise config.wrong("intermediate_size", "an even number: gate and up have half of it each")
    trained = config.get_int("seq_length", 8192)
    rope = RopeSpec(
        theta=config.get_float("rope_theta", 10000.0, aliases=("rotary_emb_base",)),
        method="dynamic_steps" if config.get_bool("use_dynamic_ntk", True) else "default",
        original_max_position=trained,
    )
    ropes: tuple[RopeSpec, ...] = (rope,)
    positions = Positions()
    if config.get_bool("use_logn_attn", True):
        ropes = (rope, replace(rope, log_scale_from=trained))
        positions = Positions(query_table=QUERIES)
    return llama_like(
        config,
        attention={"qkv_bias": True, "positions": positions},
        mlp={"intermediate_size": inner // 2},
        head_dim=head_dim,
        norm=Norm(epsilon=config.get_float("rms_norm_eps", 1e-6, ("layer_norm_epsilon",))),
        activation="silu",
        ropes=ropes,
    )
