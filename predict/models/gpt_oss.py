"""gpt-oss: attention with sinks, a window in every other layer, clamped experts with biases."""

from predict.nn.blocks import Activation, Norm
from predict.nn.hf_config import ConfigReader, llama_like, sparse_like
from predict.nn.spec import DecoderSpec
from predict.nn.weights import JOINED_GATE_UP, WeightNames

WEIGHTS = WeightNames(
    router="mlp.router.weight",
    router_bias="mlp.router.bias",
    expert_gate_up=(JOINED_GATE_UP,),
    expert_rows="interleaved",
    experts_transposed=True,
)
UNREAD = ("initial_context_length",)
# Where config.json says nothing.
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def spec(config: ConfigReader) -> DecoderSpec:
    if not config.values.get("rope_parameters"):
        config = config.with_defaults(rope_scaling=ROPE)
    config.must_be("hidden_act", "silu")
    bias = config.get_bool("attention_bias", True)
    dense = llama_like(
        config,
        attention={"qkv_bias": bias, "out_bias": bias, "sinks": True},
        windows=config.layer_windows(
            config.get_int("sliding_window", 128), lambda index: index % 2 == 0
        ),
        head_dim=config.get_int("head_dim", 64),
        norm=Norm(epsilon=config.get_float("rms_norm_eps", 1e-5)),
        theta=150000.0,
    )
    return sparse_like(
        config,
        dense,
        {
            "num_experts": config.get_int("num_experts", 128, aliases=("num_local_experts",)),
            "top_k": config.get_int("num_experts_per_tok", 4, aliases=("experts_per_token",)),
            "renormalize": True,
            "bias": True,
        },
        config.get_int("intermediate_size"),
        activation=Activation(
            clamp=config.get_float("multiplier", 7.0, aliases=("swiglu_limit",)),
            slope=config.get_float("multiplier", 1.702, aliases=("swiglu_alpha",)),
            up_offset=1.0,
        ),
        up_bias=True,
        down_bias=True,
    )
