"""Linear attention with a decaying state: the record, its weights, and its smaller operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from predict.errors import UserError
from predict.nn import blocks
from predict.nn.shares import Axis, Cut, Ranks, joined

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.weights import WeightNames

Decay = Literal["head", "channel"]
WriteBy = Literal["sigmoid", "step"]
OutGate = Literal["silu", "sigmoid"]


@dataclass(frozen=True)
class DeltaNetBlock(blocks.Block):
    """residual + out(gated norm of what a state gives); the state is one of each request.

    K key heads of D = key_dim values, V value heads of E = value_dim. x is the normed input.
      [q, k, v, z] = qkvz(x); q, k, v = silu(causal convolution of each channel over conv_width
      tokens); [b, a] = ba(x). Value head h reads key head h // (V / K), or h % K with tiled_heads.
      With unit_keys q and k have length 1, and q is times D^-0.5.
      step = softplus(a + step_bias); g = -exp(decay) step, or with a decay_bound (below 0)
      decay_bound * sigmoid(exp(decay) (a + step_bias)); of each head, or of each of its channels.
      strength = write_scale * sigmoid(b), or step, without b.
    Of each value head the state is S [D, E], in float32 as all that is between the products:
      S *= exp(g); d = strength * (v - S^T k), without `delta` strength * v; S += k d^T; o = S^T q,
      with `skip` + skip * v.
    Then norm(o) * gate(z), or with gate_first norm(o * gate(z)); the norm is over each head's E
    values by one factor, or with norm_groups over so many groups of all heads' values.
    grouped_rows: the checkpoint has rows of qkvz, and of ba, key head by key head.
    Sources: Yang et al. 2024 (gated delta net); Kimi Linear, 2025 (channels, bound); Dao and Gu
    2024 (Mamba 2: no delta, step, skip, gate_first).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4
    conv_bias: bool = False
    norm: blocks.Norm | None = blocks.Norm()
    decay: Decay = "head"
    decay_bound: float = 0.0
    delta: bool = True
    write: WriteBy = "sigmoid"
    write_scale: float = 1.0
    unit_keys: bool = True
    skip: bool = False
    tiled_heads: bool = False
    out_norm: blocks.Norm = blocks.Norm()
    norm_groups: int = 0
    gate: OutGate = "silu"
    gate_first: bool = False
    grouped_rows: bool = False
    post_norm: blocks.Norm | None = None
    post_norm_of: blocks.Placement = "output"
    residual: blocks.Residual = blocks.Residual()
    partial: bool = False  # see Block

    kind = "delta_net"
    linears = ("qkvz", "ba", "out")
    adapted: ClassVar = {"qkvz": 0, "ba": 0, "out": 1}  # both products of the input have one row
    reads: ClassVar = {"qkvz": "norm", "ba": "norm"}
    has_parts = False

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"num_value_heads {self.num_value_heads} is not a multiple of num_key_heads "
                f"{self.num_key_heads}"
            )
        if self.write == "step" and (self.decay != "head" or self.decay_bound or self.delta):
            raise ValueError("write by step goes with a decay per head, and no bound or delta")
        if self.conv_width < 2 or self.decay_bound > 0:
            raise ValueError("conv_width is 2 and more, decay_bound 0 or below")
        if self.norm_groups and self.value_size % self.norm_groups:
            raise ValueError(f"norm_groups {self.norm_groups} do not divide {self.value_size}")
        if self.out_norm.kind != "rms" or self.out_norm.bias or self.out_norm.plus_one:
            raise ValueError(f"out_norm is {self.out_norm} (allowed: rms, its weight the factor)")

    def shared(self, ranks: Ranks) -> tuple[DeltaNetBlock, Mapping[str, Axis]]:
        keys = ranks.alike(self.num_key_heads, "key heads of states")
        count, group = self.num_key_heads, self.num_value_heads // self.num_key_heads
        heads = [(begin * group, end * group) for begin, end in keys.ranges]
        if self.tiled_heads:
            heads = [
                (at * count + b, at * count + e) for at in range(group) for b, e in keys.ranges
            ]
        values, groups = Axis(self.num_value_heads, joined(heads)), self.norm_groups
        if groups % ranks.size or (groups and self.tiled_heads):
            raise UserError(
                f"{groups} groups of a norm of states do not divide among {ranks.size} ranks; use "
                "another --tensor_parallel_degree"
            )
        block = replace(
            self,
            num_key_heads=keys.count,
            num_value_heads=values.count,
            norm_groups=groups // ranks.size,
            partial=True,
        )
        return block, {"state_keys": keys, "state_values": values}

    @property
    def cuts(self) -> Mapping[str, Cut]:
        values, conv = ("state_values",), ("state_keys", "state_keys", "state_values")
        parts = (self.key_size, self.key_size, self.value_size)
        return {
            "qkvz": Cut((*conv, *values), parts=(*parts, self.value_size)),
            "ba": Cut(values * (2 if self.write == "sigmoid" else 1)),
            "conv": Cut(conv, parts=parts),
            "conv_bias": Cut(conv, parts=parts),
            **dict.fromkeys(("decay", "step_bias", "skip"), Cut(values)),
            "out_norm": Cut(values if self.norm_groups else ()),
            "out": Cut(columns="state_values"),
        }

    @property
    def key_size(self) -> int:
        """Values of a token's keys; of its queries, too."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Values of a token's values."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_size + self.value_size

    @property
    def decay_size(self) -> int:
        """Decays of a token."""
        return self.num_value_heads * (self.key_dim if self.decay == "channel" else 1)

    @property
    def states(self) -> tuple[blocks.StateTensor, ...]:
        return (
            blocks.StateTensor("conv_state", (self.conv_width - 1, self.conv_size)),
            blocks.StateTensor(
                "state", (self.num_value_heads, self.key_dim, self.value_dim), may_round=True
            ),
        )

    @property
    def costs(self) -> blocks.Costs:
        return blocks.Costs(3 * (self.conv_size + self.value_size))

    def adapted_parts(self, slot: blocks.LinearSlot) -> tuple[int, ...]:
        # Of rows that lie key head by key head one matrix makes all parts.
        return (slot.out_features,) if self.grouped_rows else slot.part_sizes

    def row_groups(self, slot: blocks.LinearSlot, names: WeightNames) -> int:
        return self.num_key_heads if self.grouped_rows else 0

    def name(self, slot: str, names: WeightNames) -> str | tuple[str, ...]:
        return super().name(slot if slot in ("norm", "post_norm") else f"delta_{slot}", names)

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> DeltaNet:
        taps = slots["conv"].transpose([1, 0]).contiguous()
        return DeltaNet(self, **{**slots, "conv": taps})

    def slots(self, hidden_size: int) -> tuple[blocks.Slot, ...]:
        conv, values, heads = self.conv_size, self.value_size, self.num_value_heads
        whole: tuple[int, ...] = (conv, values)
        if self.grouped_rows:
            whole = (self.key_size, self.key_size, values, values)
        gates = (heads, self.decay_size) if self.write == "sigmoid" else (self.decay_size,)
        taps, norm_size = (conv, self.conv_width), values if self.norm_groups else self.value_dim
        table = blocks.TableSlot
        return (
            *blocks.norm_slots("norm", self.norm, hidden_size),
            blocks.LinearSlot("qkvz", whole, hidden_size, False),
            blocks.LinearSlot("ba", gates, hidden_size, False, is_rounded=False),
            table("conv", taps, True, (conv, 1, self.conv_width)),
            *((table("conv_bias", (conv,), True),) if self.conv_bias else ()),
            table("decay", (heads,), True),
            table("step_bias", (self.decay_size,), True),
            *((table("skip", (heads,), True),) if self.skip else ()),
            table("out_norm", (norm_size,), True),
            blocks.LinearSlot("out", (hidden_size,), values, False),
            *blocks.norm_slots("post_norm", self.post_norm, hidden_size),
        )


@dataclass(frozen=True, slots=True)
class DeltaNet(blocks.BlockWeights):
    """Weights of a delta net block."""

    block: DeltaNetBlock
    qkvz: blocks.Linear  # queries, keys, values, gates
    ba: blocks.Linear  # strengths, decays
    conv: Tensor  # [conv_width, conv_size] float32, the last tap is the newest token's
    decay: Tensor  # [V] float32, the logarithm
    step_bias: Tensor  # [decay_size] float32
    out_norm: Tensor  # [E] or [V * E] float32
    out: blocks.Linear
    norm: blocks.NormWeights | None = None
    conv_bias: Tensor | None = None  # [conv_size] float32
    skip: Tensor | None = None  # [V] float32
    post_norm: blocks.NormWeights | None = None

    def run(
        self, ops: ModuleType, hidden: Tensor, step: blocks.BlockStep
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.normed(ops, hidden)
        qkvz, ba = (self.product(ops, x, slot, step) for slot in ("qkvz", "ba"))
        mixed, written = ops.delta_net(qkvz, ba, self, step.cache, step.inputs)
        if step.rows is not None:
            mixed, hidden, x = (ops.take(each, step.rows) for each in (mixed, hidden, x))
            step = step.of_rows(ops)
        return self.ended(ops, hidden, x, self.product(ops, mixed, "out", step)), written
