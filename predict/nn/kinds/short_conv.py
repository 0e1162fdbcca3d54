"""A short gated convolution: the record, its weights, and the block as smaller operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from predict.nn import blocks
from predict.nn.shares import Axis, Cut, Ranks

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.weights import WeightNames


@dataclass(frozen=True)
class ShortConvBlock(blocks.Block):
    """residual + out(c * conv(b * x)); [b, c, x] = bcx(normed input), of `size` channels each.

    The convolution is causal, of each channel over `width` tokens, in float32. The state of a
    request is b * x of its last width - 1 tokens.
    Source: LFM2, Liquid AI 2025.
    """

    size: int
    width: int = 3
    norm: blocks.Norm | None = blocks.Norm()
    conv_bias: bool = False  # of the convolution
    bias: bool = False  # of the first product
    out_bias: bool = False
    post_norm: blocks.Norm | None = None
    post_norm_of: blocks.Placement = "output"
    residual: blocks.Residual = blocks.Residual()
    partial: bool = False  # see Block

    kind = "short_conv"
    linears = ("bcx", "out")
    adapted: ClassVar = {"bcx": 0, "out": 1}
    adapts_on_gpus = False
    biases: ClassVar = {"bcx": "bias", "out": "out_bias"}
    reads: ClassVar = {"bcx": "norm"}
    has_parts = False

    def shared(self, ranks: Ranks) -> tuple[ShortConvBlock, Mapping[str, Axis]]:
        channels, bias = ranks.features(self.size), self.out_bias and ranks.is_first
        block = replace(self, size=channels.count, out_bias=bias, partial=True)
        return block, {"channels": channels}

    @property
    def cuts(self) -> Mapping[str, Cut]:
        channels = ("channels",)
        return {
            "bcx": Cut(channels * 3, parts=(self.size,) * 3),
            "taps": Cut(channels),
            "taps_bias": Cut(channels),
            "out": Cut(columns="channels"),
        }

    @property
    def states(self) -> tuple[blocks.StateTensor, ...]:
        return (blocks.StateTensor("conv_state", (self.width - 1, self.size)),)

    @property
    def costs(self) -> blocks.Costs:
        return blocks.Costs(4 * self.size)

    def name(self, slot: str, names: WeightNames) -> str | tuple[str, ...]:
        return super().name(slot if slot in ("norm", "post_norm") else f"conv_{slot}", names)

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> ShortConv:
        taps = slots["taps"].transpose([1, 0]).contiguous()
        return ShortConv(self, **{**slots, "taps": taps})

    def slots(self, hidden_size: int) -> tuple[blocks.Slot, ...]:
        size, table = self.size, blocks.TableSlot
        return (
            *blocks.norm_slots("norm", self.norm, hidden_size),
            blocks.LinearSlot("bcx", (3 * size,), hidden_size, self.bias),
            table("taps", (size, self.width), True, (size, 1, self.width)),
            *((table("taps_bias", (size,), True),) if self.conv_bias else ()),
            blocks.LinearSlot("out", (hidden_size,), size, self.out_bias),
            *blocks.norm_slots("post_norm", self.post_norm, hidden_size),
        )


@dataclass(frozen=True, slots=True)
class ShortConv(blocks.BlockWeights):
    """Weights of a short convolution's block."""

    block: ShortConvBlock
    bcx: blocks.Linear
    taps: Tensor  # [width, size] float32, the last tap is the newest token's
    out: blocks.Linear
    norm: blocks.NormWeights | None = None
    taps_bias: Tensor | None = None  # [size] float32
    post_norm: blocks.NormWeights | None = None

    def run(
        self, ops: ModuleType, hidden: Tensor, step: blocks.BlockStep
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.normed(ops, hidden)
        bcx = self.product(ops, x, "bcx", step)
        mixed, written = ops.short_conv(bcx, self, step.cache, step.inputs)
        if step.rows is not None:
            mixed, hidden, x = (ops.take(each, step.rows) for each in (mixed, hidden, x))
            step = step.of_rows(ops)
        return self.ended(ops, hidden, x, self.product(ops, mixed, "out", step)), written
