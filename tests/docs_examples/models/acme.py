"""Acme: Llama's shape with a bias on queries, keys and values, under names of its own."""

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    embedding="acme.tokens.weight",
    final_norm="acme.final_norm.weight",
    head="acme.head",
    layer="acme.blocks.{layer}.",
    attention_norm="norm_1.weight",
    qkv=("attention.query", "attention.key", "attention.value"),
    out=("attention.output",),
    mlp_norm="norm_2.weight",
    gate_up=("mlp.gate", "mlp.up"),
    down=("mlp.down",),
)


def spec(config: ConfigReader) -> DecoderSpec:
    """See predict.models.Family."""
    return llama_like(config, {"qkv_bias": config.get_bool("use_qkv_bias", True)})
