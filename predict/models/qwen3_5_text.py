"""Qwen3.5, 3.6 and 3.8: Qwen3-Next with an MLP, and a delta net's matrices one by one."""

from dataclasses import replace

from predict.models import qwen3_next
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

WEIGHTS = replace(
    qwen3_next.WEIGHTS,
    delta_qkvz=("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    delta_ba=("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)
UNREAD = ("mtp_use_dedicated_embeddings",)


def spec(config: ConfigReader) -> DecoderSpec:
    return qwen3_next.hybrid_like(config, grouped=False)
