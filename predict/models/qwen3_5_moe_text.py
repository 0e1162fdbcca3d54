"""Qwen3.5 with experts, and a shared one behind a gate, in place of MLPs."""

from predict.models import qwen3_5_text
from predict.models.qwen3_next import with_gated_experts
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

WEIGHTS = qwen3_5_text.WEIGHTS
UNREAD = qwen3_5_text.UNREAD


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("norm_topk_prob", True)
    inner = config.get_int("moe_intermediate_size", 512)
    dense = qwen3_5_text.spec(config.with_defaults(intermediate_size=inner))  # of no layer
    return with_gated_experts(config, dense, 256, 8)
