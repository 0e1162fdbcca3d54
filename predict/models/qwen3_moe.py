"""Qwen 3's models with experts: its attention, and experts in place of some or all MLPs."""

from collections.abc import Callable

from predict.models.qwen2 import windows
from predict.models.qwen3 import attention_fields
from predict.nn.hf_config import ConfigReader, llama_like, sparse_like
from predict.nn.spec import DecoderSpec


def sparse_layers(config: ConfigReader) -> Callable[[int], bool]:
    """Which layers have experts: every decoder_sparse_step-th but those of mlp_only_layers."""
    step = config.get_int("decoder_sparse_step", 1)
    dense = config.get_ints("mlp_only_layers", config.get_int("num_hidden_layers"))
    return lambda index: index not in dense and (index + 1) % step == 0


def spec(config: ConfigReader) -> DecoderSpec:
    dense = llama_like(
        config,
        attention=attention_fields(config),
        windows=windows(config, lambda index: True),
    )
    router = {
        "num_experts": config.get_int("num_experts", 128, aliases=("num_local_experts",)),
        "top_k": config.get_int("num_experts_per_tok", 8),
        "renormalize": config.get_bool("norm_topk_prob", False),
    }
    inner = config.get_int("moe_intermediate_size", 768)
    return sparse_like(config, dense, router, inner, sparse_layers(config))
