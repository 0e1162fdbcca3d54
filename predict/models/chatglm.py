"""ChatGLM-6B, and what came of it.

ChatGLM2, ChatGLM3 and the first GLM-4: few key heads, half of each rotated in pairs. ChatGLM-6B:
prompts that see themselves both ways, positions in two dimensions, sums with normed inputs.
"""

from predict.nn.blocks import Activation, Norm, Positions, Residual
from predict.nn.hf_config import ConfigReader, blocks_of, check_groups, decoder_spec
from predict.nn.spec import DecoderSpec, HeadSpec, PrefixSpec, RopeSpec
from predict.nn.weights import WeightNames
from predict.text.chat_formats import names_of

WEIGHTS = WeightNames(
    embedding="transformer.embedding.word_embeddings.weight",
    layer="transformer.encoder.layers.{layer}.",
    qkv=("self_attention.query_key_value",),
    out=("self_attention.dense",),
    gate_up=("mlp.dense_h_to_4h",),
    down=("mlp.dense_4h_to_h",),
    final_norm="transformer.encoder.final_layernorm.weight",
    head="transformer.output_layer",
    ignored=("rotary_pos_emb.inv_freq",),
)
FIRST_WEIGHTS = WeightNames(
    base="transformer.",
    embedding="transformer.word_embeddings.weight",
    layer="transformer.layers.{layer}.",
    qkv=("attention.query_key_value",),
    qkv_rows="grouped",
    out=("attention.dense",),
    gate_up=("mlp.dense_h_to_4h",),
    down=("mlp.dense_4h_to_h",),
    final_norm="transformer.final_layernorm.weight",
    ignored=("rotary_emb.inv_freq",),
)


def weights(config: ConfigReader) -> WeightNames:
    return FIRST_WEIGHTS if _is_first(config) else WEIGHTS


def _is_first(config: ConfigReader) -> bool:
    return not config.get_bool("multi_query_attention", False)


def _is_second(config: ConfigReader) -> bool:
    """Whether it is a ChatGLM2, whose rope_ratio divides positions; that of others is the base's.

    Names alone tell: config.json's fields are those of ChatGLM3.
    """
    return "-chatglm2-" in names_of(config.path.parent, config.values)


def spec(config: ConfigReader) -> DecoderSpec:
    return _first_spec(config) if _is_first(config) else later_spec(config)


def _first_spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("position_encoding_2d", True)
    config.must_be("no_block_position", False)  # PaddleNLP's, as the next
    config.must_be("attention_scale", True)
    config.must_be("activation", "gelu")
    config.must_be("tie_word_embeddings", False)
    config.must_be("pre_seq_len", None)
    config.must_be("quantization_bit", 0)
    hidden_size = config.get_int("hidden_size")
    num_heads = config.get_int("num_attention_heads")
    if hidden_size % (4 * num_heads):
        raise config.wrong("num_attention_heads", "a fourth of hidden_size, or part of that")
    head_dim = hidden_size // num_heads
    num_layers = config.get_int("num_hidden_layers", aliases=("num_layers",))
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-5, ("layernorm_epsilon",)), True)
    residual = Residual("normed", input_scale=(2 * num_layers) ** 0.5)
    layer = blocks_of(
        (num_heads, num_heads, head_dim),
        config.get_int("intermediate_size", 4 * hidden_size, aliases=("inner_hidden_size",)),
        Activation("gelu_tanh", gated=False),
        bias=True,
        attention={"positions": Positions(two_dimensional=True), "prefix_mask": True},
        norm=norm,
        residual=residual,
    )
    masks = (config.get_int("gmask_token_id"), config.get_int("mask_token_id"))
    return decoder_spec(
        config,
        hidden_size=hidden_size,
        layers=(layer,) * num_layers,
        max_position=config.get_int(
            "max_position_embeddings", 2048, aliases=("max_sequence_length",)
        ),
        ropes=(RopeSpec(rotary_dim=head_dim // 2),),
        head=HeadSpec(norm),
        prefix=PrefixSpec(config.get_int("bos_token_id"), masks),
    )


def later_spec(config: ConfigReader) -> DecoderSpec:
    """ChatGLM2's, ChatGLM3's and the first GLM-4's."""
    for key in ("rmsnorm", "post_layer_norm", "original_rope"):
        config.must_be(key, True)
    config.must_be("interleaved_qkv", False)
    config.must_be("tie_word_embeddings", False)
    config.must_be("pre_seq_len", None)
    config.must_be("quantization_bit", 0)
    hidden_size = config.get_int("hidden_size")
    num_heads = config.get_int("num_attention_heads")
    num_kv_heads = config.get_int("num_key_value_heads", aliases=("multi_query_group_num",))
    check_groups(config, num_heads, num_kv_heads)
    head_dim = config.get_int("head_dim", aliases=("kv_channels",))
    bias = config.get_bool("add_bias_linear", False)
    norm = Norm(epsilon=config.get_float("layer_norm_eps", 1e-5, ("layernorm_epsilon",)))
    normed = config.get_bool("apply_residual_connection_post_layernorm", False)
    residual = Residual("normed" if normed else "input")
    qkv_bias = bias or config.get_bool("add_qkv_bias", False)
    layer = blocks_of(
        (num_heads, num_kv_heads, head_dim),
        config.get_int("intermediate_size", aliases=("ffn_hidden_size",)),
        Activation("silu"),
        bias,
        {"positions": Positions(interleaved=True), "qkv_bias": qkv_bias},
        norm=norm,
        residual=residual,
    )
    ratio = config.get_float("factor", 1.0, aliases=("rope_ratio",))
    length = config.get_int("seq_length", 2048, aliases=("max_sequence_length",))
    rope = RopeSpec(theta=10000.0 * ratio, rotary_dim=head_dim // 2)
    if ratio != 1.0 and _is_second(config):
        rope = RopeSpec(method="linear", factor=ratio, rotary_dim=head_dim // 2)
        length = max(1, int(length / ratio))
    return decoder_spec(
        config,
        vocab_size=config.get_int("vocab_size", aliases=("padded_vocab_size",)),
        hidden_size=hidden_size,
        layers=(layer,) * config.get_int("num_hidden_layers", aliases=("num_layers",)),
        max_position=length,
        ropes=(rope,),
        head=HeadSpec(norm),
    )
