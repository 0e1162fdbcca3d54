"""Ministral 3: Mistral, whose queries grow with the logarithm of the position beyond training's."""

from dataclasses import replace

from predict.nn.blocks import Norm, Positions
from predict.nn.hf_config import ORIGINAL, ROPE_BLOCKS, ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames()


def spec(config: ConfigReader) -> DecoderSpec:
    if not any(map(config.values.get, ROPE_BLOCKS)):
        raise config.wrong("rope_parameters", "an object that says how positions turn")
    head_dim = config.get_int("head_dim", 128)
    rope = config.rope(head_dim, theta=1e6, also={"llama_4_scaling_beta": "log_growth"})
    keys, has_own = replace(rope, log_growth=0.0), rope.log_growth > 0
    if has_own and rope.original_max_position is None:  # whatever the method
        if rope.method == "dynamic":
            raise config.wrong("rope_parameters", "another rope_type beside llama_4_scaling_beta")
        rope = replace(rope, original_max_position=config.parts[-1].get_int(ORIGINAL))
    return llama_like(
        config,
        attention={"positions": Positions(query_table=1)} if has_own else {},
        windows=config.windows(),
        head_dim=head_dim,
        norm=Norm(epsilon=config.get_float("rms_norm_eps", 1e-5)),
        ropes=(keys, rope) if has_own else (keys,),
    )
