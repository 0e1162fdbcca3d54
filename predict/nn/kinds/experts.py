"""Experts that a router chooses: the records, their weights, and the block as smaller operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from predict.nn import blocks
from predict.nn.shares import Axis, Cut, Ranks

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.weights import WeightNames

Scoring = Literal["softmax", "sigmoid", "sparse_mixer"]
GroupScore = Literal["max", "top_two"]


@dataclass(frozen=True)
class Router:
    """The choice of a token's experts, and their weights, in float32.

    scores = scoring(x W^T + bias). The top_k experts with the largest scores (plus `correction`'s
    terms, for the choice alone; the lower expert on ties) are chosen, among the top_groups groups
    of consecutive experts with the largest group_score. Weights are the scores, divided by their
    sum with renormalize, times scale.
    sparse_mixer: scores are the sums themselves. The weight of a choice s is its softmax among the
    experts not chosen ahead of it whose t has (s - t) / max(|t|, s) <= 2 jitter (GRIN, 2024).
    Sources: Shazeer et al. 2017; groups and correction: DeepSeek-V2 and V3, 2024.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    num_groups: int = 1
    top_groups: int = 1
    jitter: float = 0.0  # of sparse_mixer
    group_score: GroupScore = "max"  # of its scores: the largest, or the sum of the two largest

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts do not divide into {self.num_groups} groups"
            )
        if self.scoring == "sparse_mixer" and (
            self.renormalize or self.correction or self.num_groups > 1
        ):
            raise ValueError("sparse_mixer goes without renormalize, correction and groups")
        if self.top_groups > self.num_groups:
            raise ValueError(
                f"{self.top_groups} groups of {self.num_groups} cannot be chosen (allowed: "
                f"1 to {self.num_groups})"
            )
        group_size = self.num_experts // self.num_groups
        if self.top_k > self.top_groups * group_size:
            raise ValueError(
                f"{self.top_k} experts cannot be chosen of the {self.top_groups * group_size} in "
                f"{self.top_groups} of {self.num_groups} groups"
            )
        if self.group_score == "top_two" and group_size < 2:
            raise ValueError("a group's two largest scores need groups of two experts and more")


@dataclass(frozen=True)
class ExpertBlock(blocks.Block):
    """residual + sum of the chosen experts' MLPs by the router's weights + a shared MLP.

    Each expert is down(activation(gate_up(x))), x the normed input. The shared MLP has the same
    activation; with shared_gate it is times sigmoid(x . shared_gate).
    """

    router: Router
    intermediate_size: int  # of each expert
    activation: blocks.Activation = blocks.Activation()
    norm: blocks.Norm | None = blocks.Norm()
    up_bias: bool = False  # of the gate, too
    down_bias: bool = False
    shared_size: int = 0  # inner features of all shared experts together; 0: there are none
    shared_gate: bool = False
    post_norm: blocks.Norm | None = None
    post_norm_of: blocks.Placement = "output"
    residual: blocks.Residual = blocks.Residual()
    partial: bool = False  # see Block
    # Experts of this rank, 0: all; and the first of them.
    own_experts: int = 0
    first_expert: int = 0

    kind = "experts"
    linears = ("gate_up", "down", "shared_gate_up", "shared_down")
    has_parts = False
    reads: ClassVar = {"gate_up": "norm", "shared_gate_up": "norm"}

    def __post_init__(self) -> None:
        if self.shared_gate and not self.shared_size:
            raise ValueError("a shared_gate needs a shared_size")

    @property
    def costs(self) -> blocks.Costs:
        return blocks.Costs(inner_size=self.intermediate_size, num_chosen=self.router.top_k)

    @property
    def num_experts(self) -> int:
        """Experts whose weights are here."""
        return self.own_experts or self.router.num_experts

    def shared(self, ranks: Ranks) -> tuple[ExpertBlock, Mapping[str, Axis]]:
        axes: dict[str, Axis] = {}
        changes: dict[str, Any] = {"partial": True}
        if self.shared_size:
            axes["shared"] = ranks.features(self.shared_size)
            changes["shared_size"] = axes["shared"].count
        if ranks.whole_experts:
            axes["experts"] = own = ranks.nearly_alike(self.router.num_experts, "experts")
            changes |= {"own_experts": own.count, "first_expert": own.ranges[0][0]}
        else:
            axes["inner"] = ranks.features(self.intermediate_size)
            changes["intermediate_size"] = axes["inner"].count
            changes["down_bias"] = self.down_bias and ranks.is_first
        return replace(self, **changes), axes

    @property
    def cuts(self) -> Mapping[str, Cut]:
        parts = 2 if self.activation.gated else 1
        return {
            "gate_up": Cut(("inner",) * parts, experts="experts"),
            "down": Cut(columns="inner", experts="experts"),
            "shared_gate_up": Cut(("shared",) * parts),
            "shared_down": Cut(columns="shared"),
        }

    def share_read(self, num_tokens: int) -> float:
        # Where all are equally likely.
        return 1 - (1 - self.router.top_k / self.router.num_experts) ** num_tokens

    @property
    def can_be_calibrated(self) -> bool:
        return self.is_plain

    def name(self, slot: str, names: WeightNames) -> str | tuple[str, ...]:
        return super().name(f"expert_{slot}" if slot in ("gate_up", "down") else slot, names)

    def row_groups(self, slot: blocks.LinearSlot, names: WeightNames) -> int:
        is_interleaved = slot.num_experts and names.expert_rows == "interleaved"
        return slot.part_sizes[0] if is_interleaved else 0

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> Experts:
        return Experts(self, **slots)

    def slots(self, hidden_size: int) -> tuple[blocks.Slot, ...]:
        router, inner, count = self.router, self.intermediate_size, self.router.num_experts
        gated, own = 2 if self.activation.gated else 1, self.num_experts
        return (
            *blocks.norm_slots("norm", self.norm, hidden_size),
            blocks.TableSlot("router", (count, hidden_size), False),
            *((blocks.TableSlot("router_bias", (count,), True),) if router.bias else ()),
            *((blocks.TableSlot("correction", (count,), True),) if router.correction else ()),
            blocks.LinearSlot("gate_up", (inner,) * gated, hidden_size, self.up_bias, own),
            blocks.LinearSlot("down", (hidden_size,), inner, self.down_bias, own),
            *self._shared_slots(hidden_size, gated),
            *blocks.norm_slots("post_norm", self.post_norm, hidden_size),
        )

    def _shared_slots(self, hidden_size: int, gated: int) -> tuple[blocks.Slot, ...]:
        size = self.shared_size
        if not size:
            return ()
        return (
            blocks.LinearSlot("shared_gate_up", (size,) * gated, hidden_size, False),
            blocks.LinearSlot("shared_down", (hidden_size,), size, False),
            *(
                (blocks.TableSlot("shared_gate", (1, hidden_size), False),)
                if self.shared_gate
                else ()
            ),
        )


@dataclass(frozen=True, slots=True)
class Experts(blocks.BlockWeights):
    """Weights of an expert block of E experts."""

    block: ExpertBlock
    router: Tensor  # [E, H]
    gate_up: blocks.Linear  # of E experts
    down: blocks.Linear
    norm: blocks.NormWeights | None = None
    router_bias: Tensor | None = None  # [E] float32
    correction: Tensor | None = None  # [E] float32
    shared_gate_up: blocks.Linear | None = None
    shared_down: blocks.Linear | None = None
    shared_gate: Tensor | None = None  # [1, H]
    post_norm: blocks.NormWeights | None = None

    def run(
        self, ops: ModuleType, hidden: Tensor, step: blocks.BlockStep
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.normed(ops, hidden)
        made = ops.experts(x, *ops.route(x, self), self)
        if self.shared_gate_up is not None and self.shared_down is not None:
            inner = ops.activate(ops.linear(x, self.shared_gate_up), self.block.activation)
            shared = ops.linear(inner, self.shared_down)
            if self.shared_gate is not None:
                shared = ops.gate(shared, x, self.shared_gate)
            made = ops.add(made, shared)
        return self.ended(ops, hidden, x, made), []
