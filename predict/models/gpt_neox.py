"""GPT-NeoX and Pythia: LayerNorm, biases, a rotated part of each head, parallel blocks."""

from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader, blocks_of, decoder_spec, per_head
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    embedding="gpt_neox.embed_in.weight",
    layer="gpt_neox.layers.{layer}.",
    qkv=("attention.query_key_value",),
    qkv_rows="grouped",
    out=("attention.dense",),
    gate_up=("mlp.dense_h_to_4h",),
    down=("mlp.dense_4h_to_h",),
    final_norm="gpt_neox.final_layer_norm.weight",
    head="embed_out",
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)


def spec(config: ConfigReader) -> DecoderSpec:
    hidden_size = config.get_int("hidden_size")
    num_heads = config.get_int("num_attention_heads")
    head_dim = per_head(config, hidden_size, num_heads)
    bias = config.get_bool("attention_bias", True)
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-5), True)
    layer = blocks_of(
        (num_heads, num_heads, head_dim),
        config.get_int("intermediate_size"),
        Activation(config.activation(default="gelu"), gated=False),
        bias=True,
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp={"parallel": config.get_bool("use_parallel_residual", True)},
        norm=norm,
    )
    rope = config.rope(
        head_dim,
        theta=config.get_float("rope_theta", 10000.0, aliases=("rotary_emb_base",)),
        partial=config.get_float("partial_rotary_factor", 0.25, aliases=("rotary_pct",)),
    )
    return decoder_spec(
        config,
        hidden_size=hidden_size,
        layers=(layer,) * config.get_int("num_hidden_layers"),
        ropes=(rope,),
        head=HeadSpec(norm),
    )
