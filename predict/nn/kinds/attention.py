"""Attention over keys and values: the record, its weights, and the block as smaller operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from predict.device.place import tensor_at
from predict.nn import blocks
from predict.nn.cache_formats import CacheRows, key_value_rows
from predict.nn.shares import Axis, Cut, Ranks

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.weights import WeightNames


@dataclass(frozen=True)
class AttentionBlock(blocks.CachingBlock):
    """residual + out(attention(rotated(qkv(norm(x))))); keys and values stay in the cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    norm: blocks.Norm | None = blocks.Norm()  # ahead of the product
    qk_norm: blocks.Norm | None = None  # of queries and keys, ahead of the rotation
    qk_norm_whole: bool = False  # over all heads' values, not over each head's
    qk_norm_each: bool = False  # over each head's, and each head has a factor of its own
    qk_norm_last: bool = False  # behind the rotation, over each head's
    positions: blocks.Positions = blocks.Positions()
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap); 0: they stay
    window: int = -1  # visible tokens, -1 all; among a prefix as many behind a token
    prefix_mask: bool = False  # every token sees the first inputs.prefix_lens of its request
    sinks: bool = False  # the softmax's sum has exp(sink) of the head besides (gpt-oss, 2025)
    # What attention makes is times sigmoid(gate): the product has [query, gate] of each head.
    out_gate: bool = False
    post_norm: blocks.Norm | None = None
    post_norm_of: blocks.Placement = "output"  # of what the block made, or of the sum
    residual: blocks.Residual = blocks.Residual()
    partial: bool = False  # see Block
    # Query heads of all ranks together, 0: these are all; and those of the ranks ahead.
    all_heads: int = 0
    first_head: int = 0

    kind = "attention"
    composes = True
    linears = ("qkv", "out")
    biases: ClassVar = {"qkv": "qkv_bias", "out": "out_bias"}
    adapted: ClassVar = {"qkv": 0, "out": 1}
    reads: ClassVar = {"qkv": "norm"}
    norm_reader = "qkv"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        norm = self.qk_norm
        if norm is not None and not self.qk_norm_each and (norm.kind != "rms" or norm.bias):
            raise ValueError(f"qk_norm is {norm} (allowed unless qk_norm_each: rms without bias)")
        if norm is not None and self.qk_norm_each and (norm.bias or self.qk_norm_whole):
            raise ValueError("qk_norm_each goes neither with a bias nor with qk_norm_whole")
        if self.qk_norm_last and (
            norm is None
            or self.qk_norm_each
            or self.qk_norm_whole
            or self.positions.kind != "rotary"
            or self.positions.two_dimensional
        ):
            raise ValueError("qk_norm_last is of heads with one factor, and of rotary positions")
        if self.out_gate and (self.qk_norm_whole or self.qk_norm_each):
            raise ValueError("out_gate goes neither with qk_norm_whole nor with qk_norm_each")
        if self.prefix_mask and self.positions.kind == "alibi":
            raise ValueError("a block with a prefix mask has no ALiBi")

    def shared(self, ranks: Ranks) -> tuple[blocks.Block, Mapping[str, Axis]]:
        heads = ranks.alike(self.num_heads, "query heads")
        keys = ranks.key_heads(self.num_heads, self.num_kv_heads)
        block = replace(
            self,
            num_heads=heads.count,
            num_kv_heads=keys.count,
            out_bias=self.out_bias and ranks.is_first,
            partial=True,
            all_heads=self.num_heads,
            first_head=heads.ranges[0][0],
        )
        return block, {"heads": heads, "key_heads": keys}

    @property
    def cuts(self) -> Mapping[str, Cut]:
        norms = {"q_norm": Cut(("heads",)), "k_norm": Cut(("key_heads",))}
        return {
            "qkv": Cut(("heads", "key_heads", "key_heads")),
            "qk_norm": Cut(("heads", "key_heads")),
            "out": Cut(columns="heads"),
            "sinks": Cut(("heads",)),
            **(norms if self.qk_norm_whole else {}),
        }

    @property
    def cache_rows(self) -> tuple[CacheRows, ...]:
        return key_value_rows(self.num_kv_heads, self.head_dim)

    @property
    def norms_over_ranks(self) -> bool:
        """Whether norms of queries and keys need the squares of other ranks' heads."""
        return self.qk_norm_whole and self.all_heads > 0

    @property
    def q_size(self) -> int:
        """Values of a token's queries."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Values of a token's keys; of its values, too."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Output features of the query, key and value projection."""
        return self.q_size + 2 * self.kv_size

    @property
    def slot_sizes(self) -> tuple[int, int, int]:
        """Outputs of the first product: queries, with out_gate their gates too, keys, values."""
        return self.q_size * (1 + self.out_gate), self.kv_size, self.kv_size

    @property
    def costs(self) -> blocks.Costs:
        flops = 4 * self.q_size
        return blocks.Costs(
            2 * self.qkv_size + 2 * self.out_gate * self.q_size,
            pair_flops=flops,
            decode_pair_flops=flops,
        )

    @property
    def rotated_size(self) -> int:
        return self.head_dim

    @property
    def is_fused(self) -> bool:
        return not (self.qk_norm_each or self.prefix_mask or self.positions.two_dimensional)

    @property
    def can_be_calibrated(self) -> bool:
        is_rotary = self.positions.kind == "rotary"
        return self.is_plain and self.is_fused and is_rotary and not self.out_gate

    def row_groups(self, slot: blocks.LinearSlot, names: WeightNames) -> int:
        return self.num_kv_heads if names.qkv_rows == "grouped" else 0

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> Attention:
        slopes = None
        if self.positions.kind == "alibi":
            slope = np.array(alibi_slopes(self.all_heads or self.num_heads), np.float32)
            own = slope[self.first_head : self.first_head + self.num_heads] * self.positions.scale
            slopes = tensor_at(own.astype(np.float32), place)
        return Attention(self, slopes=slopes, kv_format=kv_format, **slots)

    def slots(self, hidden_size: int) -> tuple[blocks.Slot, ...]:
        return (
            *blocks.norm_slots("norm", self.norm, hidden_size),
            blocks.LinearSlot("qkv", self.slot_sizes, hidden_size, self.qkv_bias),
            *self._qk_norm_slots(),
            blocks.LinearSlot("out", (hidden_size,), self.q_size, self.out_bias),
            *((blocks.TableSlot("sinks", (self.num_heads,), True),) if self.sinks else ()),
            *blocks.norm_slots("post_norm", self.post_norm, hidden_size),
        )

    def _qk_norm_slots(self) -> tuple[blocks.NormSlot | blocks.HeadNormSlot, ...]:
        if self.qk_norm is not None and self.qk_norm_each:
            counts = (self.num_heads, self.num_kv_heads)
            return (blocks.HeadNormSlot("qk_norm", self.qk_norm, counts, self.head_dim),)
        whole = self.qk_norm_whole
        return (
            *blocks.norm_slots("q_norm", self.qk_norm, self.q_size if whole else self.head_dim),
            *blocks.norm_slots("k_norm", self.qk_norm, self.kv_size if whole else self.head_dim),
        )


@dataclass(frozen=True, slots=True)
class Attention(blocks.BlockWeights):
    """Weights of an attention block."""

    block: AttentionBlock
    qkv: blocks.Linear  # queries, keys, values
    out: blocks.Linear
    norm: blocks.NormWeights | None = None
    q_norm: blocks.NormWeights | None = None
    k_norm: blocks.NormWeights | None = None
    qk_norm: blocks.NormWeights | None = None  # [num_heads + num_kv_heads, head_dim]
    post_norm: blocks.NormWeights | None = None
    sinks: Tensor | None = None  # [num_heads] float32
    slopes: Tensor | None = None  # [num_heads] float32, of ALiBi
    kv_format: str = "dense"  # of its cache, see predict.nn.cache_formats

    def tables(self, ropes: Sequence[Tensor]) -> list[Tensor]:
        places = self.block.positions
        listed = [] if self.slopes is None else [self.slopes]
        if places.kind == "rotary":
            tables = (places.table, places.query_table)
            listed += [ropes[table] for table in tables if table >= 0]
        return listed

    def run(
        self, ops: ModuleType, hidden: Tensor, step: blocks.BlockStep
    ) -> tuple[Tensor, list[Tensor]]:
        x = self.normed(ops, hidden)
        qkv = self.product(ops, x, "qkv", step)
        gate = None
        if self.block.out_gate:
            qkv, gate = without_gate(qkv, self.block)
        qkv = blocks.normed(ops, qkv, self.qk_norm, self.block.qk_norm)
        q, written = ops.rope_and_cache_write(qkv, self, step.cache, step.ropes, step.inputs)
        mixed = ops.paged_attention(q, self, tuple(written), step.inputs, step.tree_mask)
        mixed = mixed if gate is None else gated(mixed, gate)
        if step.rows is not None:
            mixed, hidden, x = (ops.take(each, step.rows) for each in (mixed, hidden, x))
            step = step.of_rows(ops)
        return self.ended(ops, hidden, x, self.product(ops, mixed, "out", step)), written


def without_gate(qkv: Tensor, block: AttentionBlock) -> tuple[Tensor, Tensor]:
    """Queries, keys and values [T, qkv_size], and gates [T, q_size], of the product's outputs."""
    import paddle

    heads, others = paddle.split(qkv, [2 * block.q_size, 2 * block.kv_size], axis=-1)
    pairs = heads.reshape([-1, block.num_heads, 2, block.head_dim])
    q, gate = (pairs[:, :, part].reshape([-1, block.q_size]) for part in range(2))
    return paddle.concat([q, others], axis=-1), gate


def gated(mixed: Tensor, gate: Tensor) -> Tensor:
    """Mixed * sigmoid(gate), in float32, in mixed's dtype."""
    import paddle

    open_part = paddle.nn.functional.sigmoid(gate.astype("float32"))
    return (mixed.astype("float32") * open_part).astype(mixed.dtype)


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head: powers of 2^(-8 / heads), and between them where heads are no power.

    Source: Press et al. 2022, "Train short, test long", and its published code.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    between = [2.0 ** (-4.0 * (i + 1) / whole) for i in range(0, 2 * whole, 2)]
    return slopes + between[: num_heads - whole]
