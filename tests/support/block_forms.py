"""Layers whose blocks differ in norms, residuals, functions and positions, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from predict.nn.blocks import (
    Activation,
    Linear,
    LinearSlot,
    Norm,
    NormSlot,
    NormWeights,
    Positions,
    Residual,
    TableSlot,
)
from predict.nn.decoder import Layer
from predict.nn.kinds.attention import Attention, AttentionBlock, alibi_slopes
from predict.nn.kinds.mlp import Mlp, MlpBlock

RMS, LAYER = Norm(epsilon=1e-5), Norm("layer", 1e-5, bias=True)
PLUS_ONE = Norm(epsilon=1e-6, plus_one=True)

# What each form changes of Llama's blocks: attention, MLP.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "layer norms, ALiBi, GELU": (
        {"norm": LAYER, "positions": Positions("alibi"), "qkv_bias": True, "out_bias": True},
        {"norm": LAYER, "activation": Activation("gelu", False), "up_bias": True,
         "down_bias": True},
    ),
    "biases, norms of heads": (
        {"qkv_bias": True, "out_bias": True, "qk_norm": RMS},
        {"up_bias": True, "down_bias": True},
    ),
    "norms around, caps": (
        {"norm": PLUS_ONE, "post_norm": PLUS_ONE, "softcap": 30.0, "qk_norm": PLUS_ONE},
        {"norm": PLUS_ONE, "post_norm": PLUS_ONE, "activation": Activation("gelu_tanh")},
    ),
    "norms behind alone": (
        {"norm": None, "post_norm": RMS, "qk_norm": RMS, "qk_norm_whole": True},
        {"norm": None, "post_norm": RMS},
    ),
    "sums normed": (
        {"norm": None, "post_norm": LAYER, "post_norm_of": "sum",
         "positions": Positions("none")},
        {"norm": None, "post_norm": LAYER, "post_norm_of": "sum",
         "activation": Activation("relu", False)},
    ),
    "parallel": (
        {"norm": LAYER, "positions": Positions(interleaved=True)},
        {"norm": LAYER, "parallel": True, "activation": Activation("relu_squared", False)},
    ),
    "scaled residuals": (
        {"norm": RMS, "residual": Residual(output_scale=0.3)},
        {"norm": RMS, "residual": Residual(input_scale=0.5, output_scale=1.5)},
    ),
    "residuals of normed inputs": (
        {"norm": LAYER, "residual": Residual("normed", 2.5)},
        {"norm": LAYER, "residual": Residual("normed", 2.5),
         "activation": Activation("gelu", False)},
    ),
    "a window, ALiBi": (
        {"positions": Positions("alibi"), "window": 15},
        {},
    ),
    "sinks": (
        {"sinks": True, "post_norm": RMS, "softcap": 5.0, "window": 15, "out_bias": True},
        {},
    ),
}  # fmt: skip


def blocks_of(
    form: str, heads: tuple[int, int, int], inner: int
) -> tuple[AttentionBlock, MlpBlock]:
    """The form's records. heads: query heads, key/value heads, head_dim."""
    attention, mlp = FORMS[form]
    whole = AttentionBlock(*heads, heads[2] ** -0.5, RMS)
    return replace(whole, **attention), replace(MlpBlock(inner, norm=RMS), **mlp)


def layer_of(
    blocks: tuple[AttentionBlock, MlpBlock],
    hidden: int,
    linear: Callable[[int, int, bool], Linear],
    vector: Callable[[int, float], Any],
    table: Callable[[Any], Any],
) -> Layer:
    """Weights of the blocks' slots.

    linear: makes one of inputs, outputs, whether it has biases. vector: makes one of so many
    values around a number. table: places float32 values.
    """
    made: list[Attention | Mlp] = []
    for block in blocks:
        slots: dict[str, Any] = {}
        for slot in block.slots(hidden):
            if isinstance(slot, LinearSlot):
                slots[slot.name] = linear(slot.in_features, sum(slot.part_sizes), slot.has_bias)
            elif isinstance(slot, NormSlot):
                weight = vector(slot.size, 0.0 if slot.norm.plus_one else 1.0)
                bias = vector(slot.size, 0.0) if slot.norm.bias else None
                slots[slot.name] = NormWeights(weight, bias)
            elif isinstance(slot, TableSlot):  # sinks: some below all scores, some above
                slots[slot.name] = table(np.linspace(-8, 8, slot.shape[0], dtype=np.float32))
        if isinstance(block, MlpBlock):
            made.append(Mlp(block, **slots))
            continue
        if block.positions.kind == "alibi":
            slots["slopes"] = table(np.array(alibi_slopes(block.num_heads), np.float32))
        made.append(Attention(block, **slots))
    return tuple(made)
