"""Baichuan and Baichuan 2: Llama with one matrix of projections; the 13B ones have ALiBi."""

from typing import Any

from predict.nn.blocks import Norm, Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames
from predict.text.chat_formats import is_baichuan_2

WEIGHTS = WeightNames(qkv=("self_attn.W_pack",))


def spec(config: ConfigReader) -> DecoderSpec:
    config.must_be("tie_word_embeddings", False)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    # The second generation has a head whose rows have length 1.
    normalized = is_baichuan_2(config.values)
    changes: dict[str, Any] = {}
    if config.values.get("max_position_embeddings") is None:  # the 13B ones
        changes = {
            "attention": {"positions": Positions("alibi")},
            "ropes": (),
            "max_position": config.get_int("seq_length", 4096, aliases=("model_max_length",)),
        }
    return llama_like(config, head=HeadSpec(norm, normalized=normalized), **changes)
