"""Acme's narrow models: Llama's layers, each with a bottleneck behind its MLP."""

from dataclasses import replace

from predict.nn.kinds.bottleneck import BottleneckBlock

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    llama = llama_like(config)
    bottleneck = BottleneckBlock(config.get_int("bottleneck_size"), llama.head.norm)
    return replace(llama, layers=tuple((*layer, bottleneck) for layer in llama.layers))
