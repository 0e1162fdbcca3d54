"""Granite 3 with experts: its factors, and all experts of a layer in one tensor."""

from predict.models import granite
from predict.nn.hf_config import ConfigReader, sparse_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    router="block_sparse_moe.router.layer.weight",
    expert_gate_up=("block_sparse_moe.experts.{expert}.gate_up_proj",),
    expert_down=("block_sparse_moe.experts.{expert}.down_proj",),
)


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("mlp_bias", False)
    router = {
        "num_experts": config.get_int("num_experts", 8, aliases=("num_local_experts",)),
        "top_k": config.get_int("num_experts_per_tok", 2),
        "renormalize": True,
    }
    return sparse_like(
        config,
        granite.spec(config),
        router,
        config.get_int("intermediate_size"),
        residual=granite.residual(config),
    )
