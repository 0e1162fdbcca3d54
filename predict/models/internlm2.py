"""InternLM2 and 2.5: Llama under other names, its three projections in one matrix."""

from predict.nn.hf_config import ConfigReader, llama_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    embedding="model.tok_embeddings.weight",
    attention_norm="attention_norm.weight",
    qkv=("attention.wqkv",),
    qkv_rows="grouped",
    out=("attention.wo",),
    mlp_norm="ffn_norm.weight",
    gate_up=("feed_forward.w1", "feed_forward.w3"),
    down=("feed_forward.w2",),
    head="output",
)


def spec(config: ConfigReader) -> DecoderSpec:
    bias = config.get_bool("bias", True)
    return llama_like(config, attention={"qkv_bias": bias, "out_bias": bias})
