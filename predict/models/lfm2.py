"""LFM2: most layers have a short gated convolution, some attention with normed heads."""

from predict.models.qwen3_next import layers_with
from predict.nn.blocks import Norm
from predict.nn.hf_config import GLOBAL_LAYERS, ConfigReader, llama_like
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.short_conv import ShortConvBlock
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    attention_norm="operator_norm.weight",
    mlp_norm="ffn_norm.weight",
    final_norm="model.embedding_norm.weight",
    q_norm="self_attn.q_layernorm.weight",
    k_norm="self_attn.k_layernorm.weight",
    out=("self_attn.out_proj",),
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down=("feed_forward.w2",),
)
CONV_LAYERS = "conv"
UNREAD = (  # of training, and of the original implementation
    *("block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_xavier_init"),
    *("conv_use_xavier_init", "block_dim", "num_heads"),
)


def inner_size(config: ConfigReader) -> int:
    """Inner features of the MLPs."""
    size = config.get_int("block_ff_dim", config.get_int("intermediate_size", 12288))
    if not config.get_bool("block_auto_adjust_ff_dim", True):
        return size
    size = int(config.get_float("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = config.get_int("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("block_use_swiglu", True)
    config.must_be("use_pos_enc", True)
    for key in ("conv_dim", "conv_dim_out"):
        config.must_be(key, config.get_int("hidden_size", 2560))
    count = config.get_int("num_hidden_layers", 32)
    full = config.get_ints("full_attn_idxs", count)
    default = [GLOBAL_LAYERS if i in full else CONV_LAYERS for i in range(count)]
    if config.values.get("full_attn_idxs") is None:
        default = [GLOBAL_LAYERS] * count
    tied = config.get_bool("tie_embedding", True)
    return hybrid_like(config, inner_size(config), default, tied)


def hybrid_like(
    config: ConfigReader, intermediate_size: int, default: list[str], tied: bool
) -> DecoderSpec:
    """DecoderSpec with MLPs of this size. default: layer_types where config.json has none."""
    norm = Norm(epsilon=config.get_float("norm_eps", 1e-5))
    dense = llama_like(
        config,
        attention={"qk_norm": norm},
        mlp={"intermediate_size": intermediate_size},
        norm=norm,
        activation="silu",
        theta=1000000.0,
        tied=tied,
    )
    has_conv = layers_with(config, CONV_LAYERS, default)
    block = ShortConvBlock(
        dense.hidden_size,
        config.get_int("conv_L_cache", 3),
        norm=norm,
        conv_bias=(bias := config.get_bool("conv_bias", False)),
        bias=bias,
        out_bias=bias,
    )
    return dense.with_blocks(
        AttentionBlock, lambda index, attention: block if has_conv[index] else attention
    )
