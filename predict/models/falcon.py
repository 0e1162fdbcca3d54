"""Falcon: parallel blocks and few key heads (7B, 40B, 11B), or serial ones with ALiBi (RW)."""

from dataclasses import replace

from predict.models.bloom import WEIGHTS as NAMES
from predict.nn.blocks import Activation, Norm, Positions, Residual
from predict.nn.hf_config import ConfigReader, blocks_of, check_groups, decoder_spec, per_head
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames


def weights(config: ConfigReader) -> WeightNames:
    """See predict.models: parallel blocks read one norm, or one each."""
    if not _is_parallel(config):
        return NAMES
    new = config.get_bool("new_decoder_architecture", False)
    if new and config.values.get("num_ln_in_parallel_attn") in (None, 2):
        return replace(NAMES, attention_norm="ln_attn.weight", mlp_norm="ln_mlp.weight")
    return replace(NAMES, mlp_norm=NAMES.attention_norm)


def _is_parallel(config: ConfigReader) -> bool:
    new = config.get_bool("new_decoder_architecture", False)
    return new or config.get_bool("parallel_attn", True)


def spec(config: ConfigReader) -> DecoderSpec:
    hidden_size = config.get_int("hidden_size", aliases=("n_embed",))
    num_heads = config.get_int("num_attention_heads", aliases=("n_head",))
    head_dim, bias = per_head(config, hidden_size, num_heads), config.get_bool("bias", False)
    num_kv_heads = num_heads
    if config.get_bool("new_decoder_architecture", False):
        num_kv_heads = config.get_int("num_key_value_heads", num_heads, aliases=("num_kv_heads",))
    elif config.get_bool("multi_query", True):
        num_kv_heads = 1
    check_groups(config, num_heads, num_kv_heads)
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-5, ("layer_norm_epsilon",)), True)
    normed = config.get_bool("apply_residual_connection_post_layernorm", False)
    residual, alibi = Residual("normed" if normed else "input"), config.get_bool("alibi", False)
    # Scores are scaled after the sum with ALiBi's term.
    positions = Positions("alibi", scale=head_dim**-0.5) if alibi else Positions()
    layer = blocks_of(
        (num_heads, num_kv_heads, head_dim),
        config.get_int("ffn_hidden_size", 4 * hidden_size),
        Activation(config.activation("activation", "gelu"), gated=False),
        bias,
        {"positions": positions},
        {"parallel": _is_parallel(config)},
        norm=norm,
        residual=residual,
    )
    return decoder_spec(
        config,
        tied=True,
        hidden_size=hidden_size,
        layers=(layer,) * config.get_int("num_hidden_layers", aliases=("n_layer",)),
        ropes=() if alibi else (config.rope(head_dim),),
        head=HeadSpec(norm),
    )
