"""Mistral 7B and its successors: Llama's shape with an optional sliding attention window."""

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    return llama_like(config, windows=config.windows())
