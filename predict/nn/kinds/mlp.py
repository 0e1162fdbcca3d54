"""The MLP: its record, its weights, and the block as smaller operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from predict.nn import blocks
from predict.nn.shares import Axis, Cut, Ranks

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True)
class MlpBlock(blocks.Block):
    """residual + down(activation(up(norm(x))))."""

    intermediate_size: int
    activation: blocks.Activation = blocks.Activation()
    norm: blocks.Norm | None = blocks.Norm()
    up_bias: bool = False  # of the gate, too
    down_bias: bool = False
    parallel: bool = False  # its norm reads what the block before it read
    post_norm: blocks.Norm | None = None
    post_norm_of: blocks.Placement = "output"
    residual: blocks.Residual = blocks.Residual()
    partial: bool = False  # see Block
    # Its input is a part of the sum over ranks; the residual is what the block before it read.
    joins: bool = False

    kind = "mlp"
    composes = True
    linears = ("gate_up", "down")
    biases: ClassVar = {"gate_up": "up_bias", "down": "down_bias"}
    adapted: ClassVar = {"gate_up": 2, "down": 3}
    reads: ClassVar = {"gate_up": "norm"}
    norm_reader = "gate_up"

    @property
    def costs(self) -> blocks.Costs:
        return blocks.Costs(inner_size=self.intermediate_size)

    @property
    def reads_before(self) -> bool:
        return self.parallel

    @property
    def can_be_calibrated(self) -> bool:
        return self.is_plain and self.activation == blocks.Activation() and not self.parallel

    def widened(self, multiple: int) -> MlpBlock:
        size = -(-self.intermediate_size // multiple) * multiple
        return replace(self, intermediate_size=size)

    def shared(self, ranks: Ranks) -> tuple[MlpBlock, Mapping[str, Axis]]:
        inner = ranks.features(self.intermediate_size)
        bias = self.down_bias and ranks.is_first
        block = replace(self, intermediate_size=inner.count, down_bias=bias, partial=True)
        return block, {"inner": inner}

    def joined(self, before: blocks.Block) -> tuple[blocks.Block, blocks.Block]:
        norms = (before.post_norm, self.post_norm)
        sums = (before.residual, self.residual)
        is_plain = norms == (None, None) and sums == (blocks.Residual(),) * 2
        if not (self.parallel and self.partial and before.partial and is_plain):
            return before, self
        part: Any = before  # every record is a dataclass
        part = replace(part, partial=False, residual=blocks.Residual("none"))
        return part, replace(self, joins=True)

    @property
    def cuts(self) -> Mapping[str, Cut]:
        parts = ("inner",) * (2 if self.activation.gated else 1)
        return {"gate_up": Cut(parts), "down": Cut(columns="inner")}

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> Mlp:
        return Mlp(self, **slots)

    def slots(self, hidden_size: int) -> tuple[blocks.Slot, ...]:
        # gate_up: the gate's outputs, then up's.
        parts = (self.intermediate_size,) * (2 if self.activation.gated else 1)
        return (
            *blocks.norm_slots("norm", self.norm, hidden_size),
            blocks.LinearSlot("gate_up", parts, hidden_size, self.up_bias),
            blocks.LinearSlot("down", (hidden_size,), self.intermediate_size, self.down_bias),
            *blocks.norm_slots("post_norm", self.post_norm, hidden_size),
        )


@dataclass(frozen=True, slots=True)
class Mlp(blocks.BlockWeights):
    """Weights of an MLP block."""

    block: MlpBlock
    gate_up: blocks.Linear  # gate's outputs, then up's; without a gate, up's
    down: blocks.Linear
    norm: blocks.NormWeights | None = None
    post_norm: blocks.NormWeights | None = None

    def run(
        self, ops: ModuleType, hidden: Tensor, step: blocks.BlockStep
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.normed(ops, step.before if self.block.parallel else hidden)
        inner = ops.activate(self.product(ops, x, "gate_up", step), self.block.activation)
        made = self.product(ops, inner, "down", step)
        if self.block.joins:
            made, hidden = ops.add(made, hidden), step.before
        return self.ended(ops, hidden, x, made), []
