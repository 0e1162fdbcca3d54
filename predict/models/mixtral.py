"""Mixtral: Mistral's layers with experts in place of the MLPs."""

from predict.nn.blocks import Norm
from predict.nn.hf_config import ConfigReader, llama_like, sparse_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    router="block_sparse_moe.gate.weight",
    expert_gate_up=(
        "block_sparse_moe.experts.{expert}.w1",
        "block_sparse_moe.experts.{expert}.w3",
    ),
    expert_down=("block_sparse_moe.experts.{expert}.w2",),
)


def spec(config: ConfigReader) -> DecoderSpec:
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-5))
    dense = llama_like(config, windows=config.windows(), norm=norm, theta=1000000.0)
    router = {
        "num_experts": config.get_int("num_experts", 8, aliases=("num_local_experts",)),
        "top_k": config.get_int("num_experts_per_tok", 2),
        "renormalize": True,
    }
    return sparse_like(config, dense, router, config.get_int("intermediate_size"))
