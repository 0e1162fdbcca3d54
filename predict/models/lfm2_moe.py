"""LFM2 with experts behind its first layers: sigmoid scores, a bias for the choice alone.

The published code adds 1e-6 to the sum that chosen scores are divided by; here nothing is added,
which changes weights by a millionth where that sum is 1.
"""

from dataclasses import replace

from predict.models import lfm2
from predict.nn.hf_config import GLOBAL_LAYERS, ConfigReader, sparse_like
from predict.nn.spec import DecoderSpec

WEIGHTS = replace(
    lfm2.WEIGHTS,
    router="feed_forward.gate.weight",
    correction="feed_forward.expert_bias",
    expert_gate_up=("feed_forward.experts.{expert}.w1", "feed_forward.experts.{expert}.w3"),
    expert_down=("feed_forward.experts.{expert}.w2",),
)


def spec(config: ConfigReader) -> DecoderSpec:
    count = config.get_int("num_hidden_layers", 32)
    dense = lfm2.hybrid_like(
        config,
        config.get_int("intermediate_size", 7168),
        [GLOBAL_LAYERS] * count,
        config.get_bool("tie_embedding", True),
    )
    router = {
        "num_experts": config.get_int("num_experts", 32),
        "top_k": config.get_int("num_experts_per_tok", 4),
        "scoring": "sigmoid",
        "renormalize": config.get_bool("norm_topk_prob", True),
        "scale": config.get_float("multiplier", 1.0, ("routed_scaling_factor",)),
        "correction": config.get_bool("use_expert_bias", True),
    }
    num_dense = config.get_int("num_dense_layers", 2)
    inner = config.get_int("moe_intermediate_size", 1792)
    return sparse_like(config, dense, router, inner, lambda index: index >= num_dense)
