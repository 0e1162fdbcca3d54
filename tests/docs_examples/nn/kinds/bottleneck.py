"""A bottleneck: x + up(gelu(down(norm(x)))), a few features wide (Houlsby et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from predict.nn import blocks

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.weights import WeightNames


@dataclass(frozen=True)
class BottleneckBlock(blocks.Block):
    """The record: what differs from layer to layer. Its `kind` is the name of this module."""

    size: int
    norm: blocks.Norm = blocks.Norm()
    post_norm: blocks.Norm | None = None
    post_norm_of: blocks.Placement = "output"
    residual: blocks.Residual = blocks.Residual()

    kind = "bottleneck"
    linears = ("down", "up")
    adapted: ClassVar = {"down": 2, "up": 3}

    def slots(self, hidden_size: int) -> tuple[blocks.Slot, ...]:
        return (
            blocks.NormSlot("norm", self.norm, hidden_size),
            blocks.LinearSlot("down", (self.size,), hidden_size, False),
            blocks.LinearSlot("up", (hidden_size,), self.size, False),
        )

    def name(self, slot: str, names: WeightNames) -> str | tuple[str, ...]:
        return "bottleneck.norm.weight" if slot == "norm" else (f"bottleneck.{slot}",)

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> Bottleneck:
        return Bottleneck(self, **slots)

    @property
    def costs(self) -> blocks.Costs:
        return blocks.Costs(inner_size=self.size)

    @property
    def is_fused(self) -> bool:
        return self.is_plain  # by csrc/blocks/bottleneck


@dataclass(frozen=True, slots=True)
class Bottleneck(blocks.BlockWeights):
    """The weights, a field for each slot."""

    block: BottleneckBlock
    norm: blocks.NormWeights
    down: blocks.Linear
    up: blocks.Linear
    post_norm: blocks.NormWeights | None = None

    def run(
        self, ops: ModuleType, hidden: Tensor, step: blocks.BlockStep
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.normed(ops, hidden)
        inner = ops.activate(
            self.product(ops, x, "down", step), blocks.Activation("gelu", gated=False)
        )
        return self.ended(ops, hidden, x, self.product(ops, inner, "up", step)), []
