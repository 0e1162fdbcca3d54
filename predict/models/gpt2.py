"""GPT-2: LayerNorm, biases, tanh-GELU, learned positions, matrices stored [in, out]."""

from dataclasses import replace

from predict.nn.blocks import Activation, Function, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, decoder_spec, per_head
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    base="transformer.",
    embedding="transformer.wte.weight",
    positions="transformer.wpe.weight",
    layer="transformer.h.{layer}.",
    attention_norm="ln_1.weight",
    qkv=("attn.c_attn",),
    out=("attn.c_proj",),
    mlp_norm="ln_2.weight",
    gate_up=("mlp.c_fc",),
    down=("mlp.c_proj",),
    final_norm="transformer.ln_f.weight",
    transposed=True,
    ignored=("attn.bias", "attn.masked_bias"),
)


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("scale_attn_weights", True)
    config.must_be("add_cross_attention", False)
    return gpt2_like(
        config,
        Norm("layer", config.get_float("layer_norm_eps", 1e-5, ("layer_norm_epsilon",)), True),
        config.activation("activation_function", "gelu_new"),
        config.get_int("max_position_embeddings", 1024, aliases=("n_positions",)),
        "n_inner",
    )


def gpt2_like(
    config: ConfigReader, norm: Norm, function: Function, num_positions: int, inner: str
) -> DecoderSpec:
    """DecoderSpec of GPT-2's shape. function: of the MLPs. inner: the key of their width."""
    hidden_size = config.get_int("hidden_size", aliases=("n_embd",))
    num_heads = config.get_int("num_attention_heads", aliases=("n_head",))
    num_layers = config.get_int("num_hidden_layers", aliases=("n_layer",))
    head_dim = per_head(config, hidden_size, num_heads)
    attention, mlp = blocks_of(
        (num_heads, num_heads, head_dim),
        config.get_int(inner, 4 * hidden_size),
        Activation(function, gated=False),
        bias=True,
        attention={"positions": Positions("none")},
        norm=norm,
    )
    by_layer = config.get_bool("scale_attn_by_inverse_layer_idx", False)
    scales = [attention.softmax_scale / (i + 1 if by_layer else 1) for i in range(num_layers)]
    return decoder_spec(
        config,
        tied=True,
        hidden_size=hidden_size,
        layers=tuple((replace(attention, softmax_scale=scale), mlp) for scale in scales),
        max_position=num_positions,
        embedding=EmbeddingSpec(num_positions=num_positions),
        head=HeadSpec(norm),
    )
