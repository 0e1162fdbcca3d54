"""Gemma 3's text model: Gemma 2 with norms of queries and keys, and a rotary table for windows."""

from dataclasses import replace

from predict.models.gemma import gemma_like, gemma_norm
from predict.models.gemma2 import WEIGHTS as WEIGHTS
from predict.models.gemma2 import attention_fields, head_of
from predict.nn.blocks import Positions
from predict.nn.hf_config import ConfigReader, with_positions
from predict.nn.spec import DecoderSpec

LOCAL = 1  # of the rotary tables


def spec(config: ConfigReader) -> DecoderSpec:
    pattern = config.get_int("sliding_window_pattern", 6, aliases=("_sliding_window_pattern",))
    both_ways = config.get_bool("use_bidirectional_attention", False)
    window, head_dim = config.get_int("sliding_window", 4096), config.get_int("head_dim", 256)
    if both_ways:  # a token sees half of the window on either side of it
        window = window // 2 + 1
    base = config.get_float("rope_local_base_freq", 10000.0)
    local = config.rope(head_dim, base, kind="sliding_attention")
    result = gemma_like(
        config,
        attention={
            **attention_fields(config),
            "qk_norm": gemma_norm(config),
            "prefix_mask": both_ways,
        },
        mlp={"post_norm": gemma_norm(config)},
        windows=config.layer_windows(window, lambda index: (index + 1) % pattern > 0),
        head=head_of(config),
        ropes=(config.rope(head_dim, theta=1e6, kind="full_attention"), local),
    )
    result = replace(result, overflows_float16=True)
    if both_ways:  # EmbeddingGemma
        result = replace(result, makes_text=False, tie_word_embeddings=True)
    return with_positions(result, Positions(table=LOCAL), lambda _, block: block.window > 0)
