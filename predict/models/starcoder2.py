"""StarCoder 2: Llama's attention with LayerNorm, biases, and an MLP without a gate."""

from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(gate_up=("mlp.c_fc",), down=("mlp.c_proj",))
# Published with it, and read by no code: hidden_act is its activation.
UNREAD = ("activation_function", "scale_attn_weights", "scale_attention_softmax_in_fp32")


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("mlp_type", "default")
    config.must_be("norm_type", "layer_norm")
    bias = config.get_bool("use_bias", True)
    function = config.activation(default="gelu_pytorch_tanh")
    return llama_like(
        config,
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp={"up_bias": bias, "down_bias": bias, "activation": Activation(function, gated=False)},
        norm=Norm("layer", config.get_float("layer_norm_eps", 1e-5, ("norm_epsilon",)), True),
        activation=function,
        windows=config.windows(),
        tied=True,
    )
