"""OPT: LayerNorm, biases, ReLU, learned positions; the 350M one norms its sums instead."""

from typing import Any

from predict.nn.blocks import Activation, Function, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, decoder_spec, per_head
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    base="model.",
    embedding="model.decoder.embed_tokens.weight",
    embedding_projection="model.decoder.project_in",
    positions="model.decoder.embed_positions.weight",
    layer="model.decoder.layers.{layer}.",
    attention_norm="self_attn_layer_norm.weight",
    attention_post_norm="self_attn_layer_norm.weight",
    out=("self_attn.out_proj",),
    mlp_norm="final_layer_norm.weight",
    mlp_post_norm="final_layer_norm.weight",
    gate_up=("fc1",),
    down=("fc2",),
    final_norm="model.decoder.final_layer_norm.weight",
    head_projection="model.decoder.project_out",
)
POSITION_OFFSET = 2  # rows of the table that stand ahead of position 0


def _function(config: ConfigReader) -> Function:
    if config.values.get("activation_function") is not None:
        return config.activation("activation_function")
    # PaddleNLP's "gelu" stands for the tanh approximation.
    function = config.activation(default="relu")
    return "gelu_tanh" if function == "gelu" else function


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("layer_norm_elementwise_affine", True)
    hidden_size = config.get_int("hidden_size")
    width = config.get_int("word_embed_proj_dim", hidden_size)
    num_heads, bias = config.get_int("num_attention_heads"), config.get_bool("enable_bias", True)
    head_dim = per_head(config, hidden_size, num_heads)
    norm = Norm("layer", 1e-5, bias=True)
    before = config.get_bool("do_layer_norm_before", config.get_bool("normalize_before", True))
    norms: dict[str, Any]
    norms = {"norm": norm} if before else {"norm": None, "post_norm": norm, "post_norm_of": "sum"}
    layer = blocks_of(
        (num_heads, num_heads, head_dim),
        config.get_int("intermediate_size", aliases=("ffn_dim",)),
        Activation(_function(config), gated=False),
        bias,
        {"positions": Positions("none")},
        **norms,
    )
    ends_normed = before and not config.get_bool("_remove_final_layer_norm", False)
    num_positions = config.get_int("max_position_embeddings", 2048)
    narrow = None if width == hidden_size else width
    return decoder_spec(
        config,
        tied=True,
        hidden_size=hidden_size,
        layers=(layer,) * config.get_int("num_hidden_layers"),
        embedding=EmbeddingSpec(
            width=narrow,
            num_positions=num_positions + POSITION_OFFSET,
            position_offset=POSITION_OFFSET,
        ),
        head=HeadSpec(norm if ends_normed else None, narrow),
    )
