"""BLOOM: ALiBi, LayerNorm (behind the embedding too), biases, tanh-GELU."""

from predict.nn.blocks import Activation, Norm, Positions, Residual
from predict.nn.hf_config import ConfigReader, blocks_of, decoder_spec, per_head
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    base="transformer.",
    embedding="transformer.word_embeddings.weight",
    embedding_norm="transformer.word_embeddings_layernorm.weight",
    layer="transformer.h.{layer}.",
    qkv=("self_attention.query_key_value",),
    qkv_rows="grouped",
    out=("self_attention.dense",),
    gate_up=("mlp.dense_h_to_4h",),
    down=("mlp.dense_4h_to_h",),
    final_norm="transformer.ln_f.weight",
)


def spec(config: ConfigReader) -> DecoderSpec:
    hidden_size = config.get_int("hidden_size", aliases=("n_embed",))
    num_heads = config.get_int("num_attention_heads", aliases=("n_head",))
    head_dim = per_head(config, hidden_size, num_heads)
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-5, ("layer_norm_epsilon",)), True)
    normed = config.get_bool("apply_residual_connection_post_layernorm", False)
    residual = Residual("normed" if normed else "input")
    layer = blocks_of(
        (num_heads, num_heads, head_dim),
        4 * hidden_size,
        Activation("gelu_tanh", gated=False),
        bias=True,
        attention={"positions": Positions("alibi")},
        norm=norm,
        residual=residual,
    )
    return decoder_spec(
        config,
        tied=True,
        hidden_size=hidden_size,
        layers=(layer,) * config.get_int("num_hidden_layers", aliases=("n_layer",)),
        max_position=config.get_int("max_position_embeddings", 2048, aliases=("seq_length",)),
        embedding=EmbeddingSpec(norm=norm),
        head=HeadSpec(norm),
    )
