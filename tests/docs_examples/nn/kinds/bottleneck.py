"""A bottleneck: x + up(gelu(down(norm(x)))), a few features wide (Houlsby et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from predict.nn.blocks import (
    Activation,
    Block,
    BlockStep,
    BlockWeights,
    Costs,
    Linear,
    LinearSlot,
    Norm,
    NormSlot,
    NormWeights,
    Placement,
    Residual,
    Slot,
)

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.weights import WeightNames


@dataclass(frozen=True)
class BottleneckBlock(Block):
    """The record: what differs from layer to layer. Its `kind` is the name of this module."""

    size: int
    norm: Norm = Norm()
    post_norm: Norm | None = None
    post_norm_of: Placement = "output"
    residual: Residual = Residual()

    kind = "bottleneck"
    linears = ("down", "up")
    adapted: ClassVar = {"down": 2, "up": 3}

    def slots(self, hidden_size: int) -> tuple[Slot, ...]:
        return (
            NormSlot("norm", self.norm, hidden_size),
            LinearSlot("down", (self.size,), hidden_size, False),
            LinearSlot("up", (hidden_size,), self.size, False),
        )

    def name(self, slot: str, names: WeightNames) -> str | tuple[str, ...]:
        return "bottleneck.norm.weight" if slot == "norm" else (f"bottleneck.{slot}",)

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> Bottleneck:
        return Bottleneck(self, **slots)

    @property
    def costs(self) -> Costs:
        return Costs(inner_size=self.size)

    @property
    def is_fused(self) -> bool:
        return False  # until csrc/blocks/bottleneck is there


@dataclass(frozen=True, slots=True)
class Bottleneck(BlockWeights):
    """The weights, a field for each slot."""

    block: BottleneckBlock
    norm: NormWeights
    down: Linear
    up: Linear
    post_norm: NormWeights | None = None

    def run(self, ops: ModuleType, hidden: Tensor, step: BlockStep) -> tuple[Tensor, list[Tensor]]:
        x = self.normed(ops, hidden)
        inner = ops.activate(self.product(ops, x, "down", step), Activation("gelu", gated=False))
        return self.ended(ops, hidden, x, self.product(ops, inner, "up", step)), []
