"""Qwen 1.5 and 2 with experts: Qwen 2's attention, experts, and a shared one behind a gate."""

from predict.models.qwen2 import windows
from predict.models.qwen3_moe import sparse_layers
from predict.nn.blocks import Activation, ExpertBlock
from predict.nn.hf_config import ConfigReader, llama_like, router_of, with_experts
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
    experts = ExpertBlock(
        router=router_of(
            config,
            num_experts=config.get_int("num_experts", 60),
            top_k=config.get_int("num_experts_per_tok", 4),
            renormalize=config.get_bool("norm_topk_prob", False),
        ),
        intermediate_size=config.get_int("moe_intermediate_size", 1408),
        activation=Activation(config.activation()),
        norm=dense.head.norm,
        shared_size=config.get_int("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    return with_experts(dense, experts, sparse_layers(config))
