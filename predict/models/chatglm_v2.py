"""ChatGLM2 and ChatGLM3 by the name that PaddleNLP has for them."""

from predict.models.chatglm import WEIGHTS, later_spec
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec

__all__ = ("WEIGHTS", "spec")


def spec(config: ConfigReader) -> DecoderSpec:
    return later_spec(config)
