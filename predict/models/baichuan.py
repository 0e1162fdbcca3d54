"""Baichuan and Baichuan 2: Llama with one matrix of projections; the 13B ones have ALiBi."""

from typing import Any

from predict.nn.blocks import Norm, Positions
from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(qkv=("self_attn.W_pack",))
SECOND_VOCABULARY = 125696  # tokens of all of the second generation; the first has 64000


def is_second(config: ConfigReader) -> bool:
    """Whether it is a Baichuan 2, the head of which has rows of length 1.

    It trained with a z-loss, the weight of which not all config.json have.
    """
    return (
        config.values.get("z_loss_weight") is not None
        or config.values.get("vocab_size") == SECOND_VOCABULARY
    )


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    config.must_be("tie_word_embeddings", False)
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6))
    changes: dict[str, Any] = {}
    if config.values.get("max_position_embeddings") is None:  # the 13B ones
        changes = {
            "attention": {"positions": Positions("alibi")},
            "ropes": (),
            "max_position": config.get_int("seq_length", 4096, aliases=("model_max_length",)),
        }
    return llama_like(config, head=HeadSpec(norm, normalized=is_second(config)), **changes)
