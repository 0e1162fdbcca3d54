"""Short ways to a network's records: a Llama-shaped spec, and weights of its two blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from predict.nn.blocks import Linear, Norm, NormWeights
from predict.nn.decoder import Head
from predict.nn.kinds.attention import Attention, AttentionBlock
from predict.nn.kinds.mlp import Mlp, MlpBlock
from predict.nn.plans import LayerPlan
from predict.nn.spec import DecoderSpec, HeadSpec, RopeSpec


def llama_spec(
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    norm_eps: float = 1e-5,
    **fields: Any,
) -> DecoderSpec:
    """A network in Llama's shape."""
    norm = Norm(epsilon=norm_eps)
    attention = AttentionBlock(num_heads, num_kv_heads, head_dim, head_dim**-0.5, norm)
    layer = attention, MlpBlock(intermediate_size, norm=norm)
    return DecoderSpec(
        **{
            "model_type": "llama",
            "layers": (layer,) * num_layers,
            "ropes": (RopeSpec(),),
            "head": HeadSpec(norm=norm),
            **fields,
        }
    )


def attention_of(
    qkv: Linear,
    out: Linear,
    norm: Any,
    heads: tuple[int, int, int],
    qk_norms: tuple[Any, Any] | None = None,
    window: int = -1,
    softmax_scale: float | None = None,
    kv_format: str = "dense",
) -> Attention:
    """Llama's attention block. heads: query heads, key/value heads, head_dim."""
    *_, head_dim = heads
    rms = Norm(epsilon=1e-5)
    block = AttentionBlock(
        *heads,
        softmax_scale or head_dim**-0.5,
        rms,
        qk_norm=rms if qk_norms else None,
        window=window,
        qkv_bias=qkv.bias is not None,
        out_bias=out.bias is not None,
    )
    q_norm, k_norm = map(NormWeights, qk_norms) if qk_norms else (None, None)
    return Attention(block, qkv, out, NormWeights(norm), q_norm, k_norm, kv_format=kv_format)


def mlp_of(gate_up: Linear, down: Linear, norm: Any) -> Mlp:
    block = MlpBlock(
        down.in_features,
        norm=Norm(epsilon=1e-5),
        up_bias=gate_up.bias is not None,
        down_bias=down.bias is not None,
    )
    return Mlp(block, gate_up, down, NormWeights(norm))


def named_linears(layer: LayerPlan) -> SimpleNamespace:
    """A layer's plans of linears, by the names of their slots."""
    return SimpleNamespace(**{name: plan for block in layer for name, plan in block.linears()})


def head_of(linear: Linear, norm: Any) -> Head:
    return Head(HeadSpec(norm=Norm(epsilon=1e-5)), NormWeights(norm), linear)
