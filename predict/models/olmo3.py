"""OLMo 3: OLMo 2 with windows in three of four layers, whose positions no scaling stretches."""

from predict.models.gemma3_text import LOCAL
from predict.models.olmo2 import WEIGHTS, olmo2_like
from predict.nn.blocks import Positions
from predict.nn.hf_config import (
    GLOBAL_LAYERS,
    LOCAL_LAYERS,
    ConfigReader,
    per_head,
    with_positions,
)
from predict.nn.spec import DecoderSpec

__all__ = ("WEIGHTS", "spec")


def spec(config: ConfigReader) -> DecoderSpec:
    heads = config.get_int("num_attention_heads")
    head_dim = config.optional_int("head_dim") or per_head(
        config, config.get_int("hidden_size"), heads
    )
    theta = config.get_float("rope_theta", 500000.0)
    result = olmo2_like(
        config,
        windows=config.layer_windows(
            config.get_int("sliding_window", 4096), lambda index: (index + 1) % 4 > 0
        ),
        head_dim=head_dim,
        ropes=tuple(config.rope(head_dim, theta, kind=k) for k in (GLOBAL_LAYERS, LOCAL_LAYERS)),
    )
    return with_positions(result, Positions(table=LOCAL), lambda _, block: block.window > 0)
