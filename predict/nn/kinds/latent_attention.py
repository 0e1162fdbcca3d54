"""Attention over latents: the record, its weights, and the block as smaller operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast

from predict.nn import blocks
from predict.nn.cache_formats import LATENT_FORMATS, CacheRows, KvFormat
from predict.nn.shares import Axis, Cut, Ranks

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.weights import WeightNames

LatentForm = Literal["cheaper", "absorbed", "expanded"]
# Of keys and values made of latents: kMaxExpandedBytes of csrc/blocks/latent_attention, and what
# their kernel keeps.
EXPANDED_BYTES = (256 + 32) << 20


@dataclass(frozen=True)
class LatentAttentionBlock(blocks.CachingBlock):
    """residual + out(attention over latents); the cache has one latent of each token.

    L kv_lora_rank, N qk_nope_head_dim, R qk_rope_head_dim, V v_head_dim. x the normed input:
      q = q_b(q_a_norm(q_a(x))), or q(x) without q_lora_rank; of each head [N], and [R] that rotate
      latent = kv_a_norm(the first L of kv_a(x)), and its last R, rotated: a row of the cache
      key of a head = key_up latent [N], then those R; value = value_up latent [V]
    key_up [N, L] and value_up [V, L] of all heads are one matrix of the checkpoint, kv_b. In the
    absorbed form a query becomes key_up^T q, attends to latents, and value_up multiplies the
    result: a latent is read once for all heads. In the expanded form latents become keys and
    values, and a pair of tokens takes N + R + V products in place of 2 L + R. `form` selects one;
    they differ in rounding alone.
    Source: DeepSeek-V2, 2024.
    """

    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    q_lora_rank: int = 0  # 0: queries are made of the input at once
    norm: blocks.Norm | None = blocks.Norm()  # ahead of the first product
    q_a_norm: blocks.Norm | None = None  # there with q_lora_rank
    kv_a_norm: blocks.Norm = blocks.Norm()
    positions: blocks.Positions = blocks.Positions(interleaved=True)  # of the R values
    a_bias: bool = False  # of the first product
    out_bias: bool = False
    form: LatentForm = "cheaper"
    post_norm: blocks.Norm | None = None
    post_norm_of: blocks.Placement = "output"
    residual: blocks.Residual = blocks.Residual()
    partial: bool = False  # see Block

    kind = "latent_attention"
    linears = ("qkv_a", "q_b", "out")
    has_parts = False
    reads: ClassVar = {"qkv_a": "norm", "q_b": "q_a_norm"}
    adapted: ClassVar = {"qkv_a": 0, "q_b": 0, "out": 1}  # both products of queries have one row

    def __post_init__(self) -> None:
        if (self.q_a_norm is not None) != (self.q_lora_rank > 0):
            raise ValueError(
                f"q_lora_rank is {self.q_lora_rank}, and q_a_norm {self.q_a_norm} (allowed: both, "
                "or neither)"
            )
        if self.positions.kind != "rotary" or self.positions.two_dimensional:
            raise ValueError(f"positions are {self.positions} (allowed: rotary, of one dimension)")
        if self.positions.query_table >= 0:
            raise ValueError("queries and keys of latents rotate by one table")

    def shared(self, ranks: Ranks) -> tuple[LatentAttentionBlock, Mapping[str, Axis]]:
        heads = ranks.alike(self.num_heads, "query heads")
        # Each rank has all latents, and their cache.
        axes = {"heads": heads, "latents": Axis(1, ((0, 1),))}
        bias = self.out_bias and ranks.is_first
        return replace(self, num_heads=heads.count, out_bias=bias, partial=True), axes

    @property
    def cuts(self) -> Mapping[str, Cut]:
        queries = Cut(("heads",))
        return {
            "qkv_a": Cut() if self.q_lora_rank else Cut(("heads", "latents")),
            "q_b": queries,
            "kv_b": queries,
            "out": Cut(columns="heads"),
        }

    @property
    def latent_size(self) -> int:
        """Values of a row of the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def cache_rows(self) -> tuple[CacheRows, ...]:
        # Rotated values are not normed, and few: codes would save little and cost more.
        return (CacheRows("latent", 1, self.latent_size, tail=self.qk_rope_head_dim),)

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)

    @property
    def mixed_size(self) -> int:
        return self.num_heads * self.v_head_dim

    @property
    def costs(self) -> blocks.Costs:
        absorbed = self.num_heads * (self.latent_size + self.kv_lora_rank)
        return blocks.Costs(
            self.q_size + self.latent_size + absorbed + self.mixed_size,
            scratch_bytes=0 if self.form == "absorbed" else EXPANDED_BYTES,
            pair_flops=2 * (self.q_size + self.mixed_size),
            decode_pair_flops=2 * absorbed,
        )

    @property
    def kv_formats(self) -> tuple[KvFormat, ...]:
        return LATENT_FORMATS

    @property
    def rotated_size(self) -> int:
        return self.qk_rope_head_dim

    @property
    def can_be_calibrated(self) -> bool:
        return self.is_plain

    def in_form(self, form: str) -> LatentAttentionBlock:
        return replace(self, form=cast(LatentForm, form))

    def name(self, slot: str, names: WeightNames) -> str | tuple[str, ...]:
        if slot == "qkv_a":
            return (names.q_a if self.q_lora_rank else names.q_whole) + names.kv_a
        return super().name(slot, names)

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> LatentAttention:
        return LatentAttention(self, kv_format=kv_format, **slots)

    def slots(self, hidden_size: int) -> tuple[blocks.Slot, ...]:
        # qkv_a: q_a's outputs (or q's), kv_a's.
        parts = (self.q_lora_rank or self.q_size, self.latent_size)
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        q_b = blocks.LinearSlot("q_b", (self.q_size,), self.q_lora_rank, False)
        return (
            *blocks.norm_slots("norm", self.norm, hidden_size),
            blocks.LinearSlot("qkv_a", parts, hidden_size, self.a_bias),
            *blocks.norm_slots("q_a_norm", self.q_a_norm, self.q_lora_rank),
            *((q_b,) if self.q_lora_rank else ()),
            blocks.NormSlot("kv_a_norm", self.kv_a_norm, self.kv_lora_rank),
            blocks.HeadSlot("kv_b", self.num_heads, sizes, self.kv_lora_rank),
            blocks.LinearSlot("out", (hidden_size,), self.mixed_size, self.out_bias),
            *blocks.norm_slots("post_norm", self.post_norm, hidden_size),
        )


@dataclass(frozen=True, slots=True)
class LatentAttention(blocks.BlockWeights):
    """Weights of a latent attention block."""

    block: LatentAttentionBlock
    qkv_a: blocks.Linear  # q_a's outputs, or the queries themselves, then kv_a's
    kv_a_norm: blocks.NormWeights
    kv_b: blocks.HeadMatrices
    out: blocks.Linear
    norm: blocks.NormWeights | None = None
    q_a_norm: blocks.NormWeights | None = None
    q_b: blocks.Linear | None = None
    post_norm: blocks.NormWeights | None = None
    kv_format: str = "dense"

    def tables(self, ropes: Sequence[Tensor]) -> list[Tensor]:
        return [ropes[self.block.positions.table]]

    def matrices(self) -> list[Tensor]:
        return [*blocks.BlockWeights.matrices(self), self.kv_b.value_up, self.kv_b.key_up]

    def run(
        self, ops: ModuleType, hidden: Tensor, step: blocks.BlockStep
    ) -> tuple[Tensor, list[Tensor]]:
        x, block = self.normed(ops, hidden), self.block
        q, latents = ops.split(self.product(ops, x, "qkv_a", step), block.latent_size)
        q = blocks.normed(ops, q, self.q_a_norm, block.q_a_norm)
        if self.q_b is not None:
            q = self.product(ops, q, "q_b", step)
        q, written = ops.turn_and_keep_latents(
            q, latents, self, step.cache, step.ropes, step.inputs
        )
        mixed = ops.latent_attention(q, self, tuple(written), step.inputs, step.tree_mask)
        if step.rows is not None:
            mixed, hidden, x = (ops.take(each, step.rows) for each in (mixed, hidden, x))
            step = step.of_rows(ops)
        return self.ended(ops, hidden, x, self.product(ops, mixed, "out", step)), written
