"""Phi-3, Phi-3.5 and Phi-4: Llama's shape with fused matrices and a window."""

from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def spec(config: ConfigReader) -> DecoderSpec:
    for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
        config.must_be(key, False)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-5))
    config = config.with_defaults(original_max_position_embeddings=4096)
    return llama_like(config, windows=config.windows(), norm=norm)
