"""Qwen 1.5 and 2 with experts: Qwen 2's attention, experts, and a shared one behind a gate."""

from predict.models.qwen2 import windows
from predict.models.qwen3_moe import sparse_layers
from predict.nn.hf_config import ConfigReader, llama_like, sparse_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down=("mlp.shared_expert.down_proj",),
)


def spec(config: ConfigReader) -> DecoderSpec:
    last = config.get_int("max_window_layers", 28)
    dense = llama_like(
        config,
        attention={"qkv_bias": config.get_bool("qkv_bias", True)},
        windows=windows(config, lambda index: index % 2 == 0 and index < last),
    )
    router = {
        "num_experts": config.get_int("num_experts", 60),
        "top_k": config.get_int("num_experts_per_tok", 4),
        "renormalize": config.get_bool("norm_topk_prob", False),
    }
    inner = config.get_int("moe_intermediate_size", 1408)
    shared = config.get_int("shared_expert_intermediate_size", 5632)
    return sparse_like(
        config, dense, router, inner, sparse_layers(config), shared_size=shared, shared_gate=True
    )
