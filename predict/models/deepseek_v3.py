"""DeepSeek V3 and R1: V2's layers, with another router; a layer behind them drafts tokens."""

from typing import Any

from predict.models.deepseek_v2 import deepseek_like
from predict.nn.hf_config import ConfigReader, router_of
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames


def weights(config: ConfigReader) -> WeightNames:
    count = config.get_int("num_nextn_predict_layers", 1, aliases=("num_mtp_layers",))
    return WeightNames().without_layers(config.get_int("num_hidden_layers"), count)


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("topk_method", "noaux_tc")
    router = noaux_router(config, num_experts=256, scale=2.5, num_groups=8, top_groups=4)
    interleaved = config.get_bool("rope_interleave", True)
    return deepseek_like(config, router_of(config, **router), interleaved)


def noaux_router(
    config: ConfigReader, num_experts: int, scale: float, num_groups: int, top_groups: int
) -> dict[str, Any]:
    """Fields of a Router with a correction; the arguments are config.json's defaults."""
    aliases = ("n_routed_experts", "num_local_experts")
    return {
        "num_experts": config.get_int("num_experts", num_experts, aliases),
        "top_k": config.get_int("num_experts_per_tok", 8),
        "scoring": "sigmoid",
        "renormalize": config.get_bool("norm_topk_prob", True),
        "scale": config.get_float("multiplier", scale, ("routed_scaling_factor",)),
        "correction": True,
        "num_groups": config.get_int("n_group", num_groups),
        "top_groups": config.get_int("topk_group", top_groups),
        "group_score": "top_two",
    }
