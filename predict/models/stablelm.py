"""StableLM: Llama's shape with LayerNorm, a rotated part of each head, parallel blocks in some."""

from dataclasses import replace

from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

NAMES = WeightNames()


def weights(config: ConfigReader) -> WeightNames:
    """See predict.models: parallel blocks read one norm."""
    return replace(NAMES, mlp_norm=NAMES.attention_norm) if _is_parallel(config) else NAMES


def _is_parallel(config: ConfigReader) -> bool:
    return config.get_bool("use_parallel_residual", False)


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    config.must_be("qk_layernorm", False)
    return llama_like(
        config,
        attention={"qkv_bias": config.get_bool("use_qkv_bias", False)},
        mlp={"parallel": _is_parallel(config)},
        norm=Norm("layer", config.get_float("layer_norm_eps", 1e-5), True),
        partial=0.25,
    )
