"""Layers as data: a layer is a short tuple of blocks, a block a frozen record.

A record says which weights a block has, what it computes and what it stores in the cache. Loading,
operators, memory sums, quantization and benchmarks read records, never a model's name.
H is the hidden size. Imports no Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

NormKind = Literal["rms", "layer"]
Function = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
NORM_KINDS: tuple[NormKind, ...] = get_args(NormKind)  # numbered as in csrc/include
# Linears that adapters of requests change (predict.adapters), in the operators' order: a row of
# pages each. Both products of latent attention's queries have one.
ADAPTED = ("qkv", "out", "gate_up", "down")
ADAPTED_ROWS = {name: row for row, name in enumerate(ADAPTED)} | {"qkv_a": 0, "q_b": 0}
PAGE_RANKS = 8  # ranks of a page of adapters
PACKED_IN, PACKED_OUT = 16, 32  # columns that the CPU's operators have side by side in one
FUNCTIONS: tuple[Function, ...] = get_args(Function)
PositionKind = Literal["rotary", "alibi", "none"]
NormPlacement = Literal["output", "sum"]
BlockInput = Literal["input", "normed"]
LatentForm = Literal["cheaper", "absorbed", "expanded"]
Scoring = Literal["softmax", "sigmoid", "sparse_mixer"]
GroupScore = Literal["max", "top_two"]


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last dim, in float32.

    rms: x / sqrt(mean(x^2) + epsilon) * weight (Zhang and Sennrich 2019). layer: the same of
    x - mean(x) (Ba et al. 2016). Then plus a bias where there is one.
    """

    kind: NormKind = "rms"
    epsilon: float = 1e-6
    bias: bool = False
    plus_one: bool = False  # the factor is 1 + the stored weight


@dataclass(frozen=True)
class Activation:
    """The function between an MLP's products: function(gate) * up, or function(up) without gate.

    With a clamp gates are at most that and ups at most that far from 0. slope: silu is
    x * sigmoid(slope * x). up_offset: added to ups.
    """

    function: Function = "silu"
    gated: bool = True
    clamp: float = 0.0  # 0: there is none
    slope: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if self.slope != 1.0 and self.function != "silu":
            raise ValueError(f"a slope is of silu, and the function is {self.function}")
        if not self.gated and (self.clamp or self.slope != 1.0 or self.up_offset):
            raise ValueError("clamp, slope and up_offset are of a gated activation")


@dataclass(frozen=True)
class Residual:
    """A block's sum: input_scale * source + output_scale * the block's last product.

    source: the block's input, or its normed input.
    """

    source: BlockInput = "input"
    input_scale: float = 1.0
    output_scale: float = 1.0


@dataclass(frozen=True)
class Positions:
    """How attention uses the positions of tokens.

    rotary: queries and keys are rotated by table `table` of DecoderSpec.ropes, queries by
    `query_table` where one is given; pairs are (i, i + R/2), or (2i, 2i + 1) when interleaved.
    two_dimensional: the R values behind those turn too, by inputs.block_positions.
    alibi: -slope * scale * distance is added to the scores (Press et al. 2022).
    """

    kind: PositionKind = "rotary"
    table: int = 0
    query_table: int = -1
    interleaved: bool = False
    two_dimensional: bool = False
    scale: float = 1.0  # alibi

    def __post_init__(self) -> None:
        if self.two_dimensional and (self.interleaved or self.kind != "rotary"):
            raise ValueError("two_dimensional positions are rotary, of pairs (i, i + R/2)")


class LinearSlot(NamedTuple):
    """A matrix of a block: outputs of each of its parts, inputs, whether it has biases.

    num_experts: not 0: so many of them, one for each expert.
    """

    name: str
    part_sizes: tuple[int, ...]
    in_features: int
    has_bias: bool
    num_experts: int = 0

    @property
    def out_features(self) -> int:
        return sum(self.part_sizes)


class HeadSlot(NamedTuple):
    """A matrix of a block whose rows are, head after head, those of each of its parts.

    It stays in the model's dtype: operators multiply by the parts of single heads.
    """

    name: str
    num_heads: int
    part_sizes: tuple[int, ...]  # rows of a head's parts
    in_features: int

    @property
    def out_features(self) -> int:
        """Rows of all heads."""
        return self.num_heads * sum(self.part_sizes)


class TableSlot(NamedTuple):
    """A tensor that is stored without a scheme, in float32 or in the model's dtype."""

    name: str
    shape: tuple[int, ...]
    is_float32: bool


class NormSlot(NamedTuple):
    """A norm of a block, over `size` values."""

    name: str
    norm: Norm
    size: int


class HeadNormSlot(NamedTuple):
    """A norm over each head's `size` values by a factor of its own; num_heads: of each part."""

    name: str
    norm: Norm
    num_heads: tuple[int, ...]
    size: int


Slot: TypeAlias = LinearSlot | HeadSlot | TableSlot | NormSlot | HeadNormSlot


class CacheRows(NamedTuple):
    """A block's rows in the cache: `size` values per token and head.

    tail: the last values of a row, which no format quantizes.
    """

    name: str
    num_heads: int
    size: int
    tail: int = 0


def key_value_rows(num_kv_heads: int, head_dim: int) -> tuple[CacheRows, ...]:
    """Rows of keys, and rows of values."""
    return CacheRows("key", num_kv_heads, head_dim), CacheRows("value", num_kv_heads, head_dim)


def _norm_slot(name: str, norm: Norm | None, size: int) -> tuple[NormSlot, ...]:
    return () if norm is None else (NormSlot(name, norm, size),)


@dataclass(frozen=True)
class AttentionBlock:
    """residual + out(attention(rotated(qkv(norm(x))))); keys and values stay in the cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    norm: Norm | None = Norm()  # ahead of the product
    qk_norm: Norm | None = None  # of queries and keys, ahead of the rotation
    qk_norm_whole: bool = False  # over all heads' values, not over each head's
    qk_norm_each: bool = False  # over each head's, and each head has a factor of its own
    qk_norm_last: bool = False  # behind the rotation, over each head's
    positions: Positions = Positions()
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float = 0.0  # scores become softcap * tanh(scores / softcap); 0: they stay
    window: int = -1  # visible tokens, -1 all
    prefix_mask: bool = False  # every token sees the first inputs.prefix_lens of its request
    sinks: bool = False  # the softmax's sum has exp(sink) of the head besides (gpt-oss, 2025)
    post_norm: Norm | None = None
    post_norm_of: NormPlacement = "output"  # of what the block made, or of the sum
    residual: Residual = Residual()

    kind = "attention"

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
        if self.prefix_mask and (self.window >= 0 or self.positions.kind == "alibi"):
            raise ValueError("a block with a prefix mask has no window and no ALiBi")

    @property
    def cache_rows(self) -> tuple[CacheRows, ...]:
        """The rows that the cache has of each token."""
        return key_value_rows(self.num_kv_heads, self.head_dim)

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
    def mixed_size(self) -> int:
        """Values of a token that the output projection reads."""
        return self.q_size

    @property
    def step_values(self) -> int:
        """Values of a token that a step holds at one time, besides its hidden states."""
        return 2 * self.qkv_size

    @property
    def pair_flops(self) -> int:
        """Operations of a query token and a visible token of a prompt."""
        return 4 * self.q_size

    @property
    def decode_pair_flops(self) -> int:
        """Operations of a decoded token and a visible token."""
        return self.pair_flops

    def slots(self, hidden_size: int) -> tuple[Slot, ...]:
        """The block's weights, in the operators' order."""
        parts = (self.q_size, self.kv_size, self.kv_size)
        return (
            *_norm_slot("norm", self.norm, hidden_size),
            LinearSlot("qkv", parts, hidden_size, self.qkv_bias),
            *self._qk_norm_slots(),
            LinearSlot("out", (hidden_size,), self.q_size, self.out_bias),
            *((TableSlot("sinks", (self.num_heads,), True),) if self.sinks else ()),
            *_norm_slot("post_norm", self.post_norm, hidden_size),
        )

    def _qk_norm_slots(self) -> tuple[NormSlot | HeadNormSlot, ...]:
        if self.qk_norm is not None and self.qk_norm_each:
            counts = (self.num_heads, self.num_kv_heads)
            return (HeadNormSlot("qk_norm", self.qk_norm, counts, self.head_dim),)
        whole = self.qk_norm_whole
        return (
            *_norm_slot("q_norm", self.qk_norm, self.q_size if whole else self.head_dim),
            *_norm_slot("k_norm", self.qk_norm, self.kv_size if whole else self.head_dim),
        )


@dataclass(frozen=True)
class LatentAttentionBlock:
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
    norm: Norm | None = Norm()  # ahead of the first product
    q_a_norm: Norm | None = None  # there with q_lora_rank
    kv_a_norm: Norm = Norm()
    positions: Positions = Positions(interleaved=True)  # of the R values
    a_bias: bool = False  # of the first product
    out_bias: bool = False
    form: LatentForm = "cheaper"
    post_norm: Norm | None = None
    post_norm_of: NormPlacement = "output"
    residual: Residual = Residual()

    kind = "latent_attention"

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
    def step_values(self) -> int:
        absorbed = self.num_heads * (self.latent_size + self.kv_lora_rank)
        return self.q_size + self.latent_size + absorbed + self.mixed_size

    @property
    def pair_flops(self) -> int:
        return 2 * (self.q_size + self.mixed_size)

    @property
    def decode_pair_flops(self) -> int:
        return 2 * self.num_heads * (self.latent_size + self.kv_lora_rank)

    def slots(self, hidden_size: int) -> tuple[Slot, ...]:
        """The block's weights, in the operators' order. qkv_a: q_a's outputs (or q's), kv_a's."""
        parts = (self.q_lora_rank or self.q_size, self.latent_size)
        sizes = (self.qk_nope_head_dim, self.v_head_dim)
        q_b = LinearSlot("q_b", (self.q_size,), self.q_lora_rank, False)
        return (
            *_norm_slot("norm", self.norm, hidden_size),
            LinearSlot("qkv_a", parts, hidden_size, self.a_bias),
            *_norm_slot("q_a_norm", self.q_a_norm, self.q_lora_rank),
            *((q_b,) if self.q_lora_rank else ()),
            NormSlot("kv_a_norm", self.kv_a_norm, self.kv_lora_rank),
            HeadSlot("kv_b", self.num_heads, sizes, self.kv_lora_rank),
            LinearSlot("out", (hidden_size,), self.mixed_size, self.out_bias),
            *_norm_slot("post_norm", self.post_norm, hidden_size),
        )


@dataclass(frozen=True)
class MlpBlock:
    """residual + down(activation(up(norm(x))))."""

    intermediate_size: int
    activation: Activation = Activation()
    norm: Norm | None = Norm()
    up_bias: bool = False  # of the gate, too
    down_bias: bool = False
    parallel: bool = False  # its norm reads what the block before it read
    post_norm: Norm | None = None
    post_norm_of: NormPlacement = "output"
    residual: Residual = Residual()

    kind = "mlp"
    cache_rows: ClassVar[tuple[CacheRows, ...]] = ()

    def slots(self, hidden_size: int) -> tuple[Slot, ...]:
        """The block's weights, in the operators' order. gate_up: the gate's outputs, then up's."""
        parts = (self.intermediate_size,) * (2 if self.activation.gated else 1)
        return (
            *_norm_slot("norm", self.norm, hidden_size),
            LinearSlot("gate_up", parts, hidden_size, self.up_bias),
            LinearSlot("down", (hidden_size,), self.intermediate_size, self.down_bias),
            *_norm_slot("post_norm", self.post_norm, hidden_size),
        )


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
class ExpertBlock:
    """residual + sum of the chosen experts' MLPs by the router's weights + a shared MLP.

    Each expert is down(activation(gate_up(x))), x the normed input. The shared MLP has the same
    activation; with shared_gate it is times sigmoid(x . shared_gate).
    """

    router: Router
    intermediate_size: int  # of each expert
    activation: Activation = Activation()
    norm: Norm | None = Norm()
    up_bias: bool = False  # of the gate, too
    down_bias: bool = False
    shared_size: int = 0  # inner features of all shared experts together; 0: there are none
    shared_gate: bool = False
    post_norm: Norm | None = None
    post_norm_of: NormPlacement = "output"
    residual: Residual = Residual()

    kind = "experts"
    cache_rows: ClassVar[tuple[CacheRows, ...]] = ()

    def __post_init__(self) -> None:
        if self.shared_gate and not self.shared_size:
            raise ValueError("a shared_gate needs a shared_size")

    def slots(self, hidden_size: int) -> tuple[Slot, ...]:
        """The block's weights, in the operators' order."""
        router, inner, count = self.router, self.intermediate_size, self.router.num_experts
        gated = 2 if self.activation.gated else 1
        return (
            *_norm_slot("norm", self.norm, hidden_size),
            TableSlot("router", (count, hidden_size), False),
            *((TableSlot("router_bias", (count,), True),) if router.bias else ()),
            *((TableSlot("correction", (count,), True),) if router.correction else ()),
            LinearSlot("gate_up", (inner,) * gated, hidden_size, self.up_bias, count),
            LinearSlot("down", (hidden_size,), inner, self.down_bias, count),
            *self._shared_slots(hidden_size, gated),
            *_norm_slot("post_norm", self.post_norm, hidden_size),
        )

    def _shared_slots(self, hidden_size: int, gated: int) -> tuple[Slot, ...]:
        size = self.shared_size
        if not size:
            return ()
        return (
            LinearSlot("shared_gate_up", (size,) * gated, hidden_size, False),
            LinearSlot("shared_down", (hidden_size,), size, False),
            *((TableSlot("shared_gate", (1, hidden_size), False),) if self.shared_gate else ()),
        )


CachingBlock: TypeAlias = AttentionBlock | LatentAttentionBlock
Block: TypeAlias = CachingBlock | MlpBlock | ExpertBlock


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head: powers of 2^(-8 / heads), and between them where heads are no power.

    Source: Press et al. 2022, "Train short, test long", and its published code.
    """
    whole = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / whole) for i in range(whole)]
    between = [2.0 ** (-4.0 * (i + 1) / whole) for i in range(0, 2 * whole, 2)]
    return slopes + between[: num_heads - whole]
