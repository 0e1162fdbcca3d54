"""PaddleNLP's GPT: GPT-2 under names of its own, its matrices turned as all of PaddleNLP's are."""

from dataclasses import replace

from predict.models.gpt2 import gpt2_like
from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec
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
UNREAD = ("scale_qk_coeff",)  # queries are divided by it, and scores multiplied


def weights(config: ConfigReader) -> WeightNames:
    """See predict.models: queries, keys and values may be of one matrix, head by head."""
    if config.get_bool("fuse_attention_qkv", False):
        return replace(NAMES, qkv=("self_attn.qkv_proj",), qkv_rows="grouped")
    return NAMES


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("normalize_before", True)
    config.must_be("tie_word_embeddings", True)
    # PaddleNLP's "gelu" stands for the tanh approximation.
    named = "hidden_act" if config.values.get("hidden_act") else "hidden_activation"
    function = config.activation(named, "gelu")
    return gpt2_like(
        config,
        Norm("layer", 1e-5, bias=True),
        "gelu_tanh" if function == "gelu" else function,
        config.get_int("max_position_embeddings", 512),
        "intermediate_size",
    )
