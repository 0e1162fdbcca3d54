"""Mistral Small 3.1 and later: Mistral within a multimodal model, of which text alone is run."""

from dataclasses import replace

from predict.models import mistral
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

WEIGHTS = replace(mistral.WEIGHTS, beside_text=("vision_tower.", "multi_modal_projector."))


def spec(config: ConfigReader) -> DecoderSpec:
    text = config.text_config()
    text.must_be("model_type", "mistral")
    return replace(mistral.spec(text), model_type="mistral3")
