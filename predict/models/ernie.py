"""ERNIE 3.5 SE of PaddleNLP: parallel blocks behind one LayerNorm, rotated, gated.

predict.loading.ernie shows its tensors under Llama's names.

"Off with head and tail": the first layer has no MLP, the last one no attention. Here the last one's
MLP is the last block of the layer before it, so that every layer has a cache.
"""

from dataclasses import replace

from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader, blocks_of, decoder_spec
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.mlp import MlpBlock
from predict.nn.spec import DecoderSpec, HeadSpec, RopeSpec

SPREAD = 8  # positions that a token takes, where the model was trained on random ones


def spec(config: ConfigReader) -> DecoderSpec:
    architectures = config.get_texts("architectures")
    if architectures and "Ernie35ForCausalLM" not in architectures:
        raise config.wrong("architectures", "Ernie35ForCausalLM; other ERNIEs make no text")
    config.must_be("hidden_act", "silu")
    hidden_size, num_heads = config.get_int("hidden_size"), config.get_int("num_attention_heads")
    if hidden_size % num_heads:
        raise config.wrong("num_attention_heads", f"a divisor of the hidden_size {hidden_size}")
    head_dim = hidden_size // num_heads
    norm = Norm("layer", config.get_float("layer_norm_eps", 1e-6), bias=True)
    bias = config.get_bool("use_bias", False)
    heads, inner = (num_heads, num_heads, head_dim), config.get_int("intermediate_size")
    attention, mlp = blocks_of(heads, inner, Activation("silu"), bias, norm=norm)
    parallel = replace(mlp, down_bias=False, parallel=True)  # attention has the bias of the sum
    num_layers = config.get_int("num_hidden_layers")
    layers: tuple[tuple[AttentionBlock | MlpBlock, ...], ...]
    layers = ((attention, parallel),) * num_layers
    if config.get_bool("parallel_attn_hatf", True):
        if num_layers < 3:
            raise config.wrong("num_hidden_layers", "3 or more with parallel_attn_hatf")
        layers = ((attention,), *layers[2:-1], (attention, parallel, mlp))
    max_position, rope = config.get_int("max_position_embeddings", 2048), RopeSpec()
    if config.get_bool("enable_random_position_ids", False):
        max_position, rope = (
            max(1, max_position // SPREAD),
            RopeSpec(method="linear", factor=1 / SPREAD),
        )
    return decoder_spec(
        config,
        hidden_size=hidden_size,
        layers=layers,
        max_position=max_position,
        ropes=(rope,),
        head=HeadSpec(norm, bias=bias and config.get_bool("weight_share_add_bias", True)),
    )
