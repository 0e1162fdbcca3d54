"""DeepSeek V3 and R1: V2's layers, with another router; a layer behind them drafts tokens."""

from predict.models.deepseek_v2 import deepseek_like
from predict.nn.blocks import Router
from predict.nn.hf_config import ConfigReader, router_of
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames


def weights(config: ConfigReader) -> WeightNames:
    count = config.get_int("num_nextn_predict_layers", 1, aliases=("num_mtp_layers",))
    return WeightNames().without_layers(config.get_int("num_hidden_layers"), count)


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("topk_method", "noaux_tc")
    return deepseek_like(config, _router(config), config.get_bool("rope_interleave", True))


def _router(config: ConfigReader) -> Router:
    return router_of(
        config,
        num_experts=config.get_int(
            "num_experts", 256, aliases=("n_routed_experts", "num_local_experts")
        ),
        top_k=config.get_int("num_experts_per_tok", 8),
        scoring="sigmoid",
        renormalize=config.get_bool("norm_topk_prob", True),
        scale=config.get_float("multiplier", 2.5, aliases=("routed_scaling_factor",)),
        correction=True,
        num_groups=config.get_int("n_group", 8),
        top_groups=config.get_int("topk_group", 4),
        group_score="top_two",
    )
