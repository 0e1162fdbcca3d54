"""PaddleNLP's GPT: GPT-2 under names of its own, its matrices turned as all of PaddleNLP's are."""

from dataclasses import replace

from predict.nn.blocks import Activation, AttentionBlock, MlpBlock, Norm, Positions
from predict.nn.hf_config import ConfigReader, decoder_spec
from predict.nn.spec import DecoderSpec, EmbeddingSpec, HeadSpec
from predict.nn.weights import WeightNames

NAMES = WeightNames(
    embedding="model.embeddings.word_embeddings.weight",
    positions="model.embeddings.position_embeddings.weight",
    layer="model.decoder.layers.{layer}.",
    attention_norm="norm1.weight",
    out=("self_attn.out_proj",),
    mlp_norm="norm2.weight",
    gate_up=("linear1",),
    down=("linear2",),
    final_norm="model.decoder.norm.weight",
)


def weights(config: ConfigReader) -> WeightNames:
    """See predict.models: queries, keys and values may be of one matrix, head by head."""
    if config.get_bool("fuse_attention_qkv", False):
        return replace(NAMES, qkv=("self_attn.qkv_proj",), qkv_rows="grouped")
    return NAMES


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    config.must_be("normalize_before", True)
    config.must_be("tie_word_embeddings", True)
    config.must_be("use_rms_norm", False)
    hidden_size, num_heads = config.get_int("hidden_size"), config.get_int("num_attention_heads")
    if hidden_size % num_heads:
        raise config.wrong("num_attention_heads", f"a divisor of the hidden_size {hidden_size}")
    head_dim = hidden_size // num_heads
    norm = Norm("layer", 1e-5, bias=True)
    # PaddleNLP's "gelu" stands for the tanh approximation.
    function = config.activation(default="gelu")
    layer = (
        AttentionBlock(
            num_heads,
            num_heads,
            head_dim,
            head_dim**-0.5,
            norm,
            positions=Positions("none"),
            qkv_bias=True,
            out_bias=True,
        ),
        MlpBlock(
            config.get_int("intermediate_size", 4 * hidden_size),
            Activation("gelu_tanh" if function == "gelu" else function, gated=False),
            norm,
            up_bias=True,
            down_bias=True,
        ),
    )
    num_positions = config.get_int("max_position_embeddings", 512)
    return decoder_spec(
        config,
        tied=True,
        hidden_size=hidden_size,
        layers=(layer,) * config.get_int("num_hidden_layers"),
        max_position=num_positions,
        embedding=EmbeddingSpec(num_positions=num_positions),
        head=HeadSpec(norm),
    )
