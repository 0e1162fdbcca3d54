"""Phi-1, 1.5 and 2: LayerNorm, biases everywhere, a rotated part of each head, parallel blocks."""

from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    out=("self_attn.dense",),
    mlp_norm="input_layernorm.weight",
    gate_up=("mlp.fc1",),
    down=("mlp.fc2",),
    final_norm="model.final_layernorm.weight",
)


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("qk_layernorm", False)
    config.must_be("tie_word_embeddings", False)
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-5), True)
    function = config.activation(default="gelu_new")
    return llama_like(
        config,
        attention={"qkv_bias": True, "out_bias": True},
        mlp={
            "activation": Activation(function, gated=False),
            "up_bias": True,
            "down_bias": True,
            "parallel": True,
        },
        norm=norm,
        activation=function,
        partial=0.5,
        head=HeadSpec(norm, bias=True),
    )
