"""Mistral Small 3.1 and later, Ministral 3: within a model with eyes, of which text alone runs."""

from dataclasses import replace

from predict.models import ministral3, mistral
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

FAMILIES = {"mistral": mistral, "ministral3": ministral3}  # of the text models
WEIGHTS = replace(mistral.WEIGHTS, beside_text=("vision_tower.", "multi_modal_projector."))


def spec(config: ConfigReader) -> DecoderSpec:
    text = config.text_config()
    family = FAMILIES.get(text.get_str("model_type", "mistral"))
    if family is None:
        raise text.wrong("model_type", ", ".join(FAMILIES))
    return replace(family.spec(text), model_type="mistral3")
