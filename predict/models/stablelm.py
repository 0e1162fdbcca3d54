"""StableLM: Llama's shape with LayerNorm, a rotated part of each head, parallel blocks in some."""

from dataclasses import replace

from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

NAMES = WeightNames(
    qk_norm=(
        "self_attn.q_layernorm.norms.{head}.weight",
        "self_attn.k_layernorm.norms.{head}.weight",
    )
)


def weights(config: ConfigReader) -> WeightNames:
    """See predict.models: parallel blocks read one norm."""
    return replace(NAMES, mlp_norm=NAMES.attention_norm) if _is_parallel(config) else NAMES


def _is_parallel(config: ConfigReader) -> bool:
    return config.get_bool("use_parallel_residual", False)


def spec(config: ConfigReader) -> DecoderSpec:
    epsilon = config.get_float("layer_norm_eps", 1e-5)
    has_qk_norm = config.get_bool("qk_layernorm", False)  # the 12B one
    return llama_like(
        config,
        attention={
            "qkv_bias": config.get_bool("use_qkv_bias", False),
            **({"qk_norm": Norm("layer", epsilon), "qk_norm_each": True} if has_qk_norm else {}),
        },
        mlp={"parallel": _is_parallel(config)},
        norm=Norm("layer", epsilon, True),
        partial=0.25,
    )
