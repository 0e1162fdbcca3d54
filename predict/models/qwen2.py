"""Qwen 2 and 2.5: Llama's shape with query, key and value biases."""

from collections.abc import Callable

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec


def windows(
    config: ConfigReader, has_window: Callable[[int], bool] | None = None
) -> tuple[int, ...]:
    """Sliding windows per layer: `layer_types` (transformers 5), else those of `has_window`.

    has_window: of a layer's number; None: of those from max_window_layers on.
    """
    is_none = "sliding_window" in config.values and config.values["sliding_window"] is None
    if is_none or not config.get_bool("use_sliding_window", False):
        return ()
    window = config.get_int("sliding_window", 4096)
    full = config.get_int("max_window_layers", 28)
    return config.layer_windows(window, has_window or (lambda index: index >= full))


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("dual_chunk_attention_config", None)  # of Qwen2.5-1M
    return llama_like(config, {"qkv_bias": True}, windows=windows(config))
