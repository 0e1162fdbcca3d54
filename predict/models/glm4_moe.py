"""GLM-4.5 and later: half of each head rotated, groups of experts behind some dense layers."""

from predict.nn.blocks import Activation, ExpertBlock, Norm
from predict.nn.hf_config import ConfigReader, llama_like, router_of, with_experts
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames


def weights(config: ConfigReader) -> WeightNames:
    """See predict.models: a layer or more behind the others make drafts."""
    count = config.get_int("num_nextn_predict_layers", 1, aliases=("num_mtp_layers",))
    return WeightNames().without_layers(config.get_int("num_hidden_layers"), count)


def spec(config: ConfigReader) -> DecoderSpec:
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-5))
    dense = llama_like(
        config,
        attention={
            "qkv_bias": config.get_bool("attention_bias", False),
            "qk_norm": norm if config.get_bool("use_qk_norm", False) else None,
        },
        norm=norm,
        partial=0.5,
    )
    inner = config.get_int("moe_intermediate_size", 1408)
    experts = ExpertBlock(
        router=router_of(
            config,
            num_experts=config.get_int(
                "num_experts", 128, aliases=("n_routed_experts", "num_local_experts")
            ),
            top_k=config.get_int("num_experts_per_tok", 8),
            scoring="sigmoid",
            renormalize=config.get_bool("norm_topk_prob", True),
            scale=config.get_float("multiplier", 1.0, aliases=("routed_scaling_factor",)),
            correction=True,
            num_groups=config.get_int("n_group", 1),
            top_groups=config.get_int("topk_group", 1),
            group_score="top_two",
        ),
        intermediate_size=inner,
        activation=Activation(config.activation()),
        norm=norm,
        shared_size=inner * config.get_int("n_shared_experts", 1),
    )
    first = config.get_int("first_k_dense_replace", 1)
    return with_experts(dense, experts, lambda index: index >= first)
