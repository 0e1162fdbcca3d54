"""ModernBERT: an encoder with rotary positions, gates, and windows that go both ways."""

from dataclasses import replace

from predict.models.bert import HEADS, encoder_spec
from predict.nn.blocks import Activation, Norm, Positions
from predict.nn.hf_config import ConfigReader, blocks_of, per_head
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    embedding="model.embeddings.tok_embeddings.weight",
    embedding_norm="model.embeddings.norm.weight",
    attention_norm="attn_norm.weight",
    qkv=("attn.Wqkv",),
    out=("attn.Wo",),
    mlp_norm="mlp_norm.weight",
    gate_up=("mlp.Wi",),
    down=("mlp.Wo",),
    final_norm="model.final_norm.weight",
    head="no_head",
    ignored=(*HEADS, "head.dense.", "head.norm.", "decoder."),
)
LOCAL = 1  # of the rotary tables
UNREAD = (  # of heads and of training
    *("classifier_activation", "classifier_bias", "classifier_pooling", "decoder_bias"),
    "initializer_cutoff_factor",
    *("sparse_pred_ignore_index", "sparse_prediction"),
)


def spec(config: ConfigReader) -> DecoderSpec:
    hidden_size = config.get_int("hidden_size")
    num_heads = config.get_int("num_attention_heads")
    head_dim = per_head(config, hidden_size, num_heads)
    norm = Norm("layer", config.get_float("norm_eps", 1e-5), config.get_bool("norm_bias", False))
    attention_bias = config.get_bool("attention_bias", False)
    mlp_bias = config.get_bool("mlp_bias", False)
    attention, mlp = blocks_of(
        (num_heads, num_heads, head_dim),
        config.get_int("intermediate_size"),
        Activation(config.activation("hidden_activation", "gelu")),
        attention={"prefix_mask": True, "qkv_bias": attention_bias, "out_bias": attention_bias},
        mlp={"up_bias": mlp_bias, "down_bias": mlp_bias},
        norm=norm,
    )
    every = config.get_int("global_attn_every_n_layers", 3)
    # A token sees half of the window on either side of it.
    window = config.get_int("local_attention", 128) // 2 + 1
    windows = config.layer_windows(window, lambda index: index % every > 0)
    layers = []
    for index, window in enumerate(windows):
        own = replace(attention, window=window, norm=norm if index else None)
        if window >= 0:
            own = replace(own, positions=Positions(table=LOCAL))
        layers.append((own, mlp))
    theta = config.get_float("rope_theta", 160000.0, aliases=("global_rope_theta",))
    local = config.get_float("rope_local_base_freq", 10000.0, aliases=("local_rope_theta",))
    return encoder_spec(
        config,
        hidden_size=hidden_size,
        layers=tuple(layers),
        max_position=config.get_int("max_position_embeddings", 8192),
        embedding=EmbeddingSpec(norm=norm),
        head=HeadSpec(norm),
        ropes=(
            config.rope(head_dim, theta, kind="full_attention"),
            config.rope(head_dim, local, kind="sliding_attention"),
        ),
    )
