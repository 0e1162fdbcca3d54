"""Qwen3.5 with experts and its eyes: qwen3_5_moe_text, of which text alone is run."""

from dataclasses import replace

from predict.models import qwen3_5, qwen3_5_moe_text
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

WEIGHTS = qwen3_5.WEIGHTS
UNREAD = qwen3_5.UNREAD


def spec(config: ConfigReader) -> DecoderSpec:
    text = config.text_config({"model_type": "qwen3_5_moe_text"})
    text.must_be("model_type", "qwen3_5_moe_text")
    return replace(qwen3_5_moe_text.spec(text), model_type="qwen3_5_moe")
