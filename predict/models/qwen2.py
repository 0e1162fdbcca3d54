"""Qwen 2 and 2.5: Llama's shape with query, key and value biases."""

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()
LAYER_TYPES = ("full_attention", "sliding_attention")


def windows(config: ConfigReader) -> tuple[int, ...]:
    """Sliding windows per layer: `layer_types` (transformers 5), else from max_window_layers on."""
    if not config.get_bool("use_sliding_window", False):
        return ()
    window = config.get_int("sliding_window", 4096)
    num_layers = config.get_int("num_hidden_layers")
    types = config.get_texts("layer_types")
    if types is None:
        full = config.optional_int("max_window_layers") or 0
        types = [LAYER_TYPES[i >= full] for i in range(num_layers)]
    if len(types) != num_layers or not set(types) <= set(LAYER_TYPES):
        raise config.wrong(
            "layer_types", f"{num_layers} of {' and '.join(LAYER_TYPES)}, as num_hidden_layers says"
        )
    return tuple(window if kind == LAYER_TYPES[True] else -1 for kind in types)


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    return llama_like(config, {"qkv_bias": True}, windows=windows(config))
