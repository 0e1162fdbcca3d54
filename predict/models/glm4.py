"""GLM-4 0414: GLM with a norm behind each block, too."""

from predict.models.glm import glm_like, glm_norm
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(gate_up=("mlp.gate_up_proj",))


def spec(config: ConfigReader) -> DecoderSpec:
    return glm_like(config, post_norm=glm_norm(config))
