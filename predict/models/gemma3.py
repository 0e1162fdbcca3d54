"""Gemma 3 with its eyes: gemma3_text within a multimodal model, of which text alone is run."""

from dataclasses import replace

from predict.models import gemma3_text
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

WEIGHTS = replace(gemma3_text.WEIGHTS, beside_text=("vision_tower.", "multi_modal_projector."))
# The published ones say of their text models only what differs from these.
DEFAULTS = {
    "model_type": "gemma3_text",
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}


def spec(config: ConfigReader) -> DecoderSpec:
    text = config.text_config(DEFAULTS)
    text.must_be("model_type", "gemma3_text")
    return replace(gemma3_text.spec(text), model_type="gemma3")
