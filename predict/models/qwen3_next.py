"""Qwen3-Next: three of four layers keep a delta net's state, the fourth has gated attention.

All norms have the factor 1 + weight, but that of a delta net's outputs.
"""

from __future__ import annotations

from typing import Any

from predict.errors import UserError
from predict.models.qwen3_moe import sparse_layers
from predict.nn.blocks import Norm
from predict.nn.hf_config import GLOBAL_LAYERS, ConfigReader, llama_like, sparse_like
from predict.nn.kinds.attention import AttentionBlock
from predict.nn.kinds.delta_net import DeltaNetBlock
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

WEIGHTS = WeightNames(
    shared_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down=("mlp.shared_expert.down_proj",),
    drafting=("mtp.",),
)
STATE_LAYERS = "linear_attention"
GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}
# What a rotary block says of pictures: the axes of a text's positions are all the same.
OF_PICTURES = ("mrope_section", "mrope_interleaved")


def delta_net(config: ConfigReader, grouped: bool) -> DeltaNetBlock:
    """The delta net of a config.json. grouped: the order of its rows, see DeltaNetBlock.

    "linear_grouped_rows" and "linear_tiled_value_heads" are what predict.gguf says of its files.
    """
    config.must_be("mamba_ssm_dtype", "float32")
    if config.activation() != "silu":
        raise config.wrong("hidden_act", "silu, the activation of the delta net's convolution")
    gate = config.get_str("output_gate_type", "swish")
    if gate not in GATES:
        raise config.wrong("output_gate_type", ", ".join(GATES))
    epsilon = config.get_float("rms_norm_eps", 1e-6)
    fields: dict[str, Any] = {
        "gate": GATES[gate],
        "grouped_rows": config.get_bool("linear_grouped_rows", grouped),
        "tiled_heads": config.get_bool("linear_tiled_value_heads", False),
    }
    try:
        return DeltaNetBlock(
            config.get_int("linear_num_key_heads", 16),
            config.get_int("linear_num_value_heads", 32),
            config.get_int("linear_key_head_dim", 128),
            config.get_int("linear_value_head_dim", 128),
            config.get_int("linear_conv_kernel_dim", 4),
            norm=Norm(epsilon=epsilon, plus_one=True),
            out_norm=Norm(epsilon=epsilon),
            **fields,
        )
    except ValueError as error:
        raise UserError(
            f"{config.path}: numbers of the linear attention do not go together: {error}"
        ) from None


def layers_with(config: ConfigReader, others: str, default: list[str]) -> list[bool]:
    """Of each layer whether layer_types, or else `default`, say `others` of it.

    The rest has full attention. Raises UserError where they say something else.
    """
    count, types = config.get_int("num_hidden_layers"), config.get_texts("layer_types")
    kinds = [others, GLOBAL_LAYERS]
    types = default if types is None else types
    if len(types) != count or not set(types) <= set(kinds):
        raise config.wrong("layer_types", f"{count} of {' and '.join(kinds)}")
    if GLOBAL_LAYERS not in types:
        raise config.wrong("layer_types", f"one of {GLOBAL_LAYERS} and more")
    return [kind == others for kind in types]


def hybrid_like(config: ConfigReader, grouped: bool) -> DecoderSpec:
    """DecoderSpec of the dense network. grouped: as `delta_net` has it."""
    config.must_be("attn_output_gate", True)
    config.get_int("mtp_num_hidden_layers", 1)  # beside the network
    norm = Norm(epsilon=config.get_float("rms_norm_eps", 1e-6), plus_one=True)
    bias = config.get_bool("attention_bias", False)
    attention = {"qkv_bias": bias, "out_bias": bias, "qk_norm": norm, "out_gate": True}
    spec = llama_like(
        config,
        attention=attention,
        norm=norm,
        head_dim=config.get_int("head_dim", 256),
        partial=0.25,
    )
    for part in config.parts:
        for key in OF_PICTURES:
            part.values.get(key)
    count, every = spec.num_layers, config.get_int("full_attention_interval", 4)
    default = [GLOBAL_LAYERS if (i + 1) % every == 0 else STATE_LAYERS for i in range(count)]
    has_state = layers_with(config, STATE_LAYERS, default)
    block = delta_net(config, grouped)
    return spec.with_blocks(
        AttentionBlock, lambda index, attention: block if has_state[index] else attention
    )


def with_gated_experts(
    config: ConfigReader, dense: DecoderSpec, num_experts: int, top_k: int
) -> DecoderSpec:
    """The network with experts, and a shared one behind a gate. The numbers are the defaults."""
    router = {
        "num_experts": config.get_int("num_experts", num_experts),
        "top_k": config.get_int("num_experts_per_tok", top_k),
        "renormalize": config.get_bool("norm_topk_prob", True),
    }
    inner = config.get_int("moe_intermediate_size", 512)
    shared = config.get_int("shared_expert_intermediate_size", 512)
    return sparse_like(
        config, dense, router, inner, sparse_layers(config), shared_size=shared, shared_gate=True
    )


def spec(config: ConfigReader) -> DecoderSpec:
    return with_gated_experts(config, hybrid_like(config, grouped=True), 512, 10)
