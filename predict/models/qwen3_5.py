"""Qwen3.5 with its eyes: qwen3_5_text within a multimodal model, of which text alone is run."""

from dataclasses import replace

from predict.models import qwen3_5_text
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

WEIGHTS = replace(qwen3_5_text.WEIGHTS, beside_text=("visual.",))
UNREAD = qwen3_5_text.UNREAD


def spec(config: ConfigReader) -> DecoderSpec:
    text = config.text_config({"model_type": "qwen3_5_text"})
    text.must_be("model_type", "qwen3_5_text")
    return replace(qwen3_5_text.spec(text), model_type="qwen3_5")
