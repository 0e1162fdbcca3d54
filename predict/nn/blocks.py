"""Layers as data: a layer is a short tuple of blocks, a block a frozen record.

A record says which weights a block has, what it computes and what it stores in the cache. Loading,
operators, memory sums, quantization and benchmarks read records, never a model's name.
Here is what all kinds of blocks share; each kind is a module of predict.nn.kinds.
T tokens, H hidden size. Imports no Paddle.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

from predict.errors import UserError
from predict.nn import cache_formats
from predict.nn.shares import Axis, Cut, Ranks, SlotShare, joined, places

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.nn.cache_formats import CacheRows, KvFormat
    from predict.nn.inputs import LayerCache, StepInputs
    from predict.nn.weights import WeightNames

NormKind = Literal["rms", "layer"]
Function = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
NORM_KINDS: tuple[NormKind, ...] = get_args(NormKind)  # numbered as in csrc/include
FUNCTIONS: tuple[Function, ...] = get_args(Function)
PositionKind = Literal["rotary", "alibi", "none"]
Placement = Literal["output", "sum"]
Source = Literal["input", "normed", "none"]


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

    source: the block's input, its normed input, or nothing.
    """

    source: Source = "input"
    input_scale: float = 1.0
    output_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.source == "none" and (self.input_scale, self.output_scale) != (1.0, 1.0):
            raise ValueError("a sum of nothing and a product has no scales")


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

    num_experts: not 0: so many of them, one for each expert. is_rounded: whether weights may be
    rounded while they are read; else they stay in the model's dtype.
    """

    name: str
    part_sizes: tuple[int, ...]
    in_features: int
    has_bias: bool
    num_experts: int = 0
    is_rounded: bool = True

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
    """A tensor that is stored without a scheme, in float32 or in the model's dtype.

    stored: its shape in a checkpoint, where that is another one.
    """

    name: str
    shape: tuple[int, ...]
    is_float32: bool
    stored: tuple[int, ...] = ()


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


class StateTensor(NamedTuple):
    """A tensor of what a block keeps of each request, however many tokens it has."""

    name: str
    shape: tuple[int, ...]  # of one request
    dtype: str = "float32"
    may_round: bool = False  # whether DecoderSpec.state_dtype says its dtype


Slot: TypeAlias = LinearSlot | HeadSlot | TableSlot | NormSlot | HeadNormSlot


def slot_parts(slot: Slot) -> tuple[int, ...]:
    """Rows of each part that a rank's share may be cut from; of norms their values, or heads."""
    if isinstance(slot, LinearSlot):
        return slot.part_sizes
    if isinstance(slot, HeadSlot):
        return (slot.out_features,)
    if isinstance(slot, TableSlot):
        return slot.shape[:1]
    return (slot.size,) if isinstance(slot, NormSlot) else slot.num_heads


def slot_share(slot: Slot, cut: Cut, axes: Mapping[str, Axis]) -> SlotShare:
    """The rows and columns of a whole slot that a rank has. axes: what it has of each axis."""
    share = SlotShare()
    if cut.rows and axes.keys() >= {*cut.rows}:
        parts = places(cut.parts or slot_parts(slot), cut.rows, axes)
        share = share._replace(rows=joined(each for part in parts for each in part))
    if cut.columns in axes and isinstance(slot, LinearSlot):
        share = share._replace(columns=places((slot.in_features,), (cut.columns,), axes)[0])
    if cut.experts in axes:
        share = share._replace(experts=axes[cut.experts].ranges[0])
    return share


def norm_slots(name: str, norm: Norm | None, size: int) -> tuple[NormSlot, ...]:
    """The slot of a norm that may not be there."""
    return () if norm is None else (NormSlot(name, norm, size),)


def is_plain_rms(norm: Norm | None) -> bool:
    """Whether it is an RMS norm with a weight alone."""
    return norm is not None and norm.kind == "rms" and not (norm.bias or norm.plus_one)


class Costs(NamedTuple):
    """What a block takes of a step. Operations are of a token and one that it sees."""

    step_values: int = 0  # of a token, held at one time besides its hidden states
    inner_size: int = 0  # features between two products, which are not in step_values
    num_chosen: int = 0  # rows of a token that its inner products have besides
    scratch_bytes: int = 0  # on a GPU, however many tokens there are
    pair_flops: int = 0  # of a prompt
    decode_pair_flops: int = 0


class Block:
    """A block's record: what every kind says of itself. Kinds are frozen dataclasses.

    csrc/make_records.py makes the C++ struct of a record's fields.
    """

    kind: ClassVar[str]  # the name of its module, and of its folder of csrc/blocks
    linears: ClassVar[tuple[str, ...]] = ()  # its LinearSlots, of any record, in order
    # Linears that may have biases, and the field that says so. A quantized checkpoint may hold some
    # where its config.json has none: calibration adds them.
    biases: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # Linears that adapters of requests change, and the row of predict.nn.inputs.ADAPTED of each.
    adapted: ClassVar[Mapping[str, int]] = MappingProxyType({})
    adapts_on_gpus: ClassVar[bool] = True
    # Linears, and the norm whose output each reads.
    reads: ClassVar[Mapping[str, str]] = MappingProxyType({})
    has_parts: ClassVar[bool] = True  # whether predict.ops.compiled has all that its `run` calls
    composes: ClassVar[bool] = False  # whether its folder of csrc/blocks has it in parts, too
    norm_reader: ClassVar[str] = ""  # the one linear that reads the norm; "": several do, or others

    norm: Norm | None  # ahead of the first product
    post_norm: Norm | None
    post_norm_of: Placement  # of what the block made, or of the sum
    residual: Residual
    # Whether its last product is a part: the sum over all ranks comes ahead of what follows.
    partial: bool = False

    def shared(self, ranks: Ranks) -> tuple[Block, Mapping[str, Axis]]:
        """The block of one of several ranks, and what that has of each axis of `cuts`.

        Raises UserError where it cannot be cut so.
        """
        raise UserError(
            f"blocks of the kind {self.kind} are not cut for several ranks yet; use "
            "--tensor_parallel_degree 1"
        )

    def joined(self, before: Block) -> tuple[Block, Block]:
        """The block before it and itself, of a rank, with one sum over ranks where they can."""
        return before, self

    @property
    def cuts(self) -> Mapping[str, Cut]:
        """By slot how ranks share it; those that are not named are whole on each."""
        return {}

    @property
    def cache_rows(self) -> tuple[CacheRows, ...]:
        """The rows that the cache has of each token."""
        return ()

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """What it keeps of each request, in place of rows of its tokens."""
        return ()

    def slots(self, hidden_size: int) -> tuple[Slot, ...]:
        """The block's weights, in the operators' order."""
        raise NotImplementedError

    def weights(self, slots: Mapping[str, Any], kv_format: str, place: Any) -> BlockWeights:
        """The weights of these slots. place: of tensors that no checkpoint holds."""
        raise NotImplementedError

    def name(self, slot: str, names: WeightNames) -> str | tuple[str, ...]:
        """The name of a slot in a checkpoint, or its names, without the layer's prefix."""
        if slot in ("norm", "post_norm"):
            slot = f"attention_{slot}" if self.cache_rows or self.states else f"mlp_{slot}"
        found: str | tuple[str, ...] = getattr(names, slot)
        return found

    def row_groups(self, slot: LinearSlot, names: WeightNames) -> int:
        """Groups of a linear's rows where its parts have one name; 0: parts lie one by one."""
        return 0

    def adapted_parts(self, slot: LinearSlot) -> tuple[int, ...]:
        """Outputs of the parts of a linear, each of which has an A of its own in adapters."""
        return slot.part_sizes

    @property
    def is_fused(self) -> bool:
        """Whether regatta_blocks computes it."""
        return True

    @property
    def is_plain(self) -> bool:
        """Whether a plain RMS norm goes ahead, and the output is x + what the block made."""
        return is_plain_rms(self.norm) and self.post_norm is None and self.residual == Residual()

    @property
    def folds_norm(self) -> bool:
        """Whether a GPU may keep the norm in the matrix behind it (regatta/cuda_ops.h)."""
        # Of parts of several ranks the sum's launch makes the norm.
        fits = self.is_plain and self.is_fused and not self.reads_before and not self.partial
        return bool(self.norm_reader) and fits

    @property
    def reads_before(self) -> bool:
        """Whether it reads what the block before it read, in place of what that made."""
        return False

    @property
    def can_be_calibrated(self) -> bool:
        """Whether quant knows how to move scales between its weights."""
        return False

    @property
    def costs(self) -> Costs:
        """What a step takes for it."""
        return Costs()

    def share_read(self, num_tokens: int) -> float:
        """The share of a slot's experts that a step of so many tokens is expected to read."""
        return 1.0

    def in_form(self, form: str) -> Block:
        """The block computed in this form, where its kind has several."""
        return self

    def widened(self, multiple: int) -> Block:
        """The block with a multiple of so many features between its products, zeros behind."""
        return self


class CachingBlock(Block):
    """A block that keeps rows in the cache: the first of its layer."""

    positions: Positions
    num_heads: int
    softmax_scale: float

    @property
    def kv_formats(self) -> tuple[KvFormat, ...]:
        """The formats that its rows may have."""
        return cache_formats.FORMATS

    @property
    def rotated_size(self) -> int:
        """Values of a head that rotate, where a rotary table does not say."""
        raise NotImplementedError


@cache
def slot_names(block: Block) -> tuple[str, ...]:
    """Of all of the block's weights, in the operators' order."""
    return tuple(slot.name for slot in block.slots(1))  # for any hidden size


@dataclass(frozen=True, slots=True)
class LowRankPages:
    """Adapters' additions to a linear: x A^T B over the pages of a row's adapter.

    In the model's dtype; b includes the scales. Each part of the outputs has its own A. For the
    CPU's compiled operators both are packed (predict.adapters.weights.packed).
    """

    a: Tensor  # [pages, parts, PAGE_RANKS, in_features]
    b: Tensor  # [pages, PAGE_RANKS, out_features]
    part_sizes: tuple[int, ...]  # output features


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias; `tensors` is what the scheme made of W [out_features, in_features].

    num_experts: not 0: of so many W; each tensor, and the bias, has them as one more dimension, the
    first.
    """

    scheme: str
    tensors: tuple[Tensor, ...]
    bias: Tensor | None  # [out_features]
    in_features: int
    out_features: int
    num_experts: int = 0
    low_rank: LowRankPages | None = None


@dataclass(frozen=True, slots=True)
class NormWeights:
    """A norm's weights: out = normalised * weight + bias.

    [heads, size] where each head has its own factor: see the operator `norm`.
    """

    weight: Tensor  # [size]
    bias: Tensor | None = None  # [size]


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """Each head's matrices from latents to keys and values, in the model's dtype.

    Packed by pack_dense, with heads as the first dimension. Compiled operators read key_up in two
    layouts, and have it twice: a hundredth of DeepSeek-V2-Lite's memory, less of larger models'.
    """

    key_up: Tensor  # [heads, qk_nope_head_dim, kv_lora_rank]
    value_up: Tensor  # [heads, v_head_dim, kv_lora_rank]
    key_absorb: Tensor | None = None  # [heads, kv_lora_rank, qk_nope_head_dim], of these


class BlockStep(NamedTuple):
    """What a block reads of a step besides its input; the cache is modified in place."""

    cache: LayerCache = ()
    ropes: Sequence[Tensor] = ()  # the decoder's tables
    inputs: StepInputs | None = None
    tree_mask: Tensor | None = None  # see the operator paged_attention
    rows: Tensor | None = None  # [L] int32, those that a block with a cache returns; None: all
    before: Tensor | None = None  # [T, H] what the block before it read

    def of_rows(self, ops: ModuleType) -> BlockStep:
        """The step of the tokens `rows`, of which all are returned."""
        inputs, rows = self.inputs, self.rows
        if rows is not None and inputs is not None:
            inputs = of_rows(ops, inputs, rows)
        return self._replace(inputs=inputs, rows=None)


def of_rows(ops: ModuleType, inputs: StepInputs, rows: Tensor) -> StepInputs:
    """The inputs with the adapters of the tokens `rows`."""
    ids = inputs.adapter_ids
    return inputs if ids is None else inputs._replace(adapter_ids=ops.take_ids(ids, rows))


class BlockWeights:
    """A block's weights; a slot that the block has not is None. Kinds are frozen dataclasses.

    `ops`: a backend, predict.ops.compiled or predict.ops.plain. Both have the operators that `run`
    calls, except those of experts and latents, which predict.ops.plain alone has.
    """

    __slots__ = ()

    block: Block
    norm: NormWeights | None
    post_norm: NormWeights | None
    kv_format: str  # of its cache, where it has one: see predict.nn.cache_formats

    def run(self, ops: ModuleType, hidden: Tensor, step: BlockStep) -> tuple[Tensor, list[Tensor]]:
        """The block as smaller operators: [T, H] or [L, H] for hidden [T, H], and its cache."""
        raise NotImplementedError

    def tables(self, ropes: Sequence[Tensor]) -> list[Tensor]:
        """Tensors that operators get behind those of its slots. ropes: the decoder's tables."""
        return []

    def linears(self) -> dict[str, Linear]:
        """Those that are there, by slot, in the operators' order."""
        found = ((name, getattr(self, name)) for name in self.block.linears)
        return {name: linear for name, linear in found if linear is not None}

    def matrices(self) -> list[Tensor]:
        """Tensors of the matrices that a decode step multiplies by, as their schemes store them."""
        return [tensor for linear in self.linears().values() for tensor in linear.tensors]

    def normed(self, ops: ModuleType, hidden: Tensor) -> Tensor:
        """The input of the first product."""
        return normed(ops, hidden, self.norm, self.block.norm)

    def product(self, ops: ModuleType, x: Tensor, slot: str, step: BlockStep) -> Tensor:
        """The product of x [T, K] and a linear, with what adapters add to it, [T, N]."""
        weights, inputs = getattr(self, slot), step.inputs
        if weights.low_rank is None or inputs is None or inputs.adapter_ids is None:
            return ops.linear(x, weights)
        row, ids, pages = self.block.adapted[slot], inputs.adapter_ids, inputs.adapter_pages
        return ops.adapted_linear(x, weights, ids, pages, row)

    def ended(self, ops: ModuleType, hidden: Tensor, x: Tensor, made: Tensor) -> Tensor:
        """The block's output. x: its normed input. made: the output of its last product."""
        residual, of = self.block.residual, self.block.post_norm_of
        if self.block.partial:
            made = ops.sum_ranks(made)
        if of == "output":
            made = normed(ops, made, self.post_norm, self.block.post_norm)
        total = made
        if residual.source != "none":
            source = x if residual.source == "normed" else hidden
            total = ops.add(source, made, residual.input_scale, residual.output_scale)
        return normed(ops, total, self.post_norm, self.block.post_norm) if of == "sum" else total


def normed(ops: ModuleType, x: Tensor, weights: NormWeights | None, norm: Norm | None) -> Tensor:
    """The norm of x; x itself without a norm."""
    return x if weights is None or norm is None else ops.norm(x, weights, norm)


# Names that were here, and where they are.
_MOVED = {"AttentionBlock": "attention", "LatentAttentionBlock": "latent_attention"}
_MOVED |= {"MlpBlock": "mlp", "ExpertBlock": "experts", "Router": "experts"}


def __getattr__(name: str) -> Any:
    """A kind's record, which a family may still import from here."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = f"predict.nn.kinds.{_MOVED[name]}"
    warnings.warn(f"{__name__}.{name} is {module}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(importlib.import_module(module), name)
