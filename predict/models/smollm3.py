"""SmolLM3: Llama's shape, in every fourth layer of which attention knows no positions."""

from predict.models.qwen2 import windows
from predict.nn.blocks import Positions
from predict.nn.hf_config import ConfigReader, llama_like, with_positions
from predict.nn.spec import DecoderSpec

INTERVAL = "no_rope_layer_interval"


def rotary_layers(config: ConfigReader) -> list[bool]:
    """Whether each layer's attention rotates: no_rope_layers, whose 1 says that it does."""
    count = config.get_int("num_hidden_layers")
    flags, interval = config.values.get("no_rope_layers"), config.values.get(INTERVAL, 4)
    if flags is None:
        if type(interval) is not int or interval < 1:
            raise config.wrong(INTERVAL, "a whole number from 1 on")
        return [bool((index + 1) % interval) for index in range(count)]
    if not isinstance(flags, list) or len(flags) < count or not set(flags) <= {0, 1}:
        raise config.wrong("no_rope_layers", f"a list of {count} numbers, 0 or 1")
    return [bool(flag) for flag in flags[:count]]


def spec(config: ConfigReader) -> DecoderSpec:
    rotates = rotary_layers(config)
    bias, mlp_bias = config.get_bool("attention_bias", False), config.get_bool("mlp_bias", False)
    rotary = llama_like(
        config,
        attention={"qkv_bias": bias, "out_bias": bias},
        mlp={"up_bias": mlp_bias, "down_bias": mlp_bias},
        windows=windows(config, lambda index: not rotates[index]),
        theta=2e6,
        tied=config.get_bool("tie_word_embeddings", True),
    )
    return with_positions(rotary, Positions("none"), lambda index, _: not rotates[index])
