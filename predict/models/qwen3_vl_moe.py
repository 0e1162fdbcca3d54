"""Qwen 3 VL's models with experts."""

from dataclasses import replace

from predict.models import qwen3_moe, qwen3_vl
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

# Published [in, out]; transformers 5 saves either.
WEIGHTS = replace(qwen3_vl.WEIGHTS, experts_by_shape=True)


def text_spec(config: ConfigReader) -> DecoderSpec:
    return qwen3_moe.spec(config.with_values(norm_topk_prob=True))  # always


def spec(config: ConfigReader) -> DecoderSpec:
    return qwen3_vl.spec(config, text_spec)
