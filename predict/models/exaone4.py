"""EXAONE 4: norms behind its blocks; beside layers with windows the others know no positions."""

from collections.abc import Callable

from predict.models.olmo2 import WEIGHTS, olmo2_like
from predict.nn.blocks import Positions
from predict.nn.hf_config import ConfigReader, with_positions
from predict.nn.spec import DecoderSpec

__all__ = ("WEIGHTS", "spec")
PATTERN = "sliding_window_pattern"


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("attention_bias", False)
    window = config.optional_int("sliding_window")
    if window is None and _has_no_windows(config):
        return olmo2_like(config, whole=False)
    windows = config.layer_windows(window or 4096, _pattern(config))
    result = olmo2_like(config, whole=False, windows=windows)
    return with_positions(result, Positions("none"), lambda _, block: block.window < 0)


def _has_no_windows(config: ConfigReader) -> bool:
    """Whether sliding_window is null, or absent where a pattern of 0 stands for layers' kinds."""
    if "sliding_window" in config.values:
        return True
    return config.values.get(PATTERN) == 0 and "layer_types" not in config.values


def _pattern(config: ConfigReader) -> Callable[[int], bool]:
    """Which layers have windows: all but every n-th, or those whose letter in "LLLG" is L."""
    pattern, last = config.values.get(PATTERN), config.get_int("num_hidden_layers") - 1
    if config.values.get("layer_types") is not None:  # which say it
        return lambda index: False
    if not isinstance(pattern, str):
        every = config.get_int(PATTERN, 4)
        return lambda index: (index + 1) % every > 0
    if not pattern or not set(pattern) <= set("LG"):
        raise config.wrong(PATTERN, "a whole number, or letters L and G")
    return lambda index: index < last and pattern[index % len(pattern)] == "L"
