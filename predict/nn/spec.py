"""DecoderSpec: what a decoder-only transformer looks like, as data. A family makes one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from predict.config.model import DTYPE_BYTES
from predict.errors import UserError
from predict.nn.blocks import Block, CachingBlock, HeadSlot, LinearSlot, Norm, StateTensor
from predict.nn.cache_formats import KV_FORMATS, CacheRows, KvFormat, kv_format_of
from predict.nn.shares import Ranks, part_of
from predict.nn.vision import VisionSpec

Kind = TypeVar("Kind", bound=Block)
RMS_NORM = Norm()


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding (Su et al. 2021) with a context-extension method.

    method: "default", "linear" (Chen et al. 2023), "dynamic" (NTK by length), "dynamic_steps" (the
    same in steps by the prompt's length, Qwen), "llama3", "yarn" (Peng et al. 2023), "longrope"
    (Ding et al. 2024). Fields that a method does not use keep their defaults.
    """

    theta: float = 10000.0
    method: str = "default"
    factor: float = 1.0
    rotary_dim: int | None = None  # None: the whole head; else its first rotary_dim dims
    original_max_position: int | None = None  # tokens of the unscaled training context
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: made of the factor
    mscale: float | None = None  # yarn (DeepSeek's spelling)
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ramp's borders to whole dims
    short_factor: tuple[float, ...] = ()  # longrope, of each pair of dims
    long_factor: tuple[float, ...] = ()
    short_attention_factor: float | None = None  # longrope, in place of attention_factor
    long_attention_factor: float | None = None
    log_scale_from: int | None = None  # tokens n: the row of length l is multiplied by log_n(l)
    # The row of position p is multiplied by 1 + this * ln(1 + floor(p / original_max_position)).
    log_growth: float = 0.0


@dataclass(frozen=True)
class EmbeddingSpec:
    """From a token's row of the table to the first layer's input, in this order.

    scale * row, projected from `width` to the hidden size, plus the learned position's row, normed.
    """

    scale: float = 1.0
    width: int | None = None  # None: the hidden size
    num_positions: int = 0  # rows of a learned table; 0: there is none
    position_offset: int = 0  # of position 0 in that table
    norm: Norm | None = None
    num_types: int = 0  # rows of a table by which of a pair's texts a token is of, added likewise


@dataclass(frozen=True)
class PrefixSpec:
    """Prompts whose first part attends in both directions, as ChatGLM-6B's do.

    The prefix ends before the first `end_id`, or with the prompt. Its tokens have rows 0, 1, ...
    of the rotary table, and row 0 in the second dimension. Later tokens have the row of the first
    of `mask_ids` in the prompt (else the prefix's last row), and rows 1, 2, ... there.
    """

    end_id: int
    mask_ids: tuple[int, ...]


@dataclass(frozen=True)
class HeadSpec:
    """From the last layer to logits: norm, projection to `width`, the head, scale, soft cap."""

    norm: Norm | None = RMS_NORM
    width: int | None = None  # None: the hidden size
    bias: bool = False
    normalized: bool = False  # the matrix's rows have length 1 (Baichuan 2)
    scale: float = 1.0
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: they stay


@dataclass(frozen=True)
class Share:
    """Which part of a network this is: one of several ranks'. See predict.nn.cuts."""

    whole: DecoderSpec
    ranks: Ranks

    def tokens(self, rank: int | None = None) -> tuple[int, int]:
        """[begin, end) of the vocabulary, whose rows of embedding and head a rank has."""
        own = self.ranks.rank if rank is None else rank
        return part_of(self.whole.vocab_size, own, self.ranks.size)

    @property
    def num_rows(self) -> int:
        """Rows of those matrices, the same on each rank: the last ones are zeros, one at least.

        The rows of tokens that other ranks have are taken from there.
        """
        return -(-self.whole.vocab_size // self.ranks.size) + 1


@dataclass(frozen=True)
class DecoderSpec:
    """Shapes and switches of one network; sizes in elements, positions in tokens.

    Of one of several ranks layers are that rank's, and the vocabulary is all of it.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[tuple[Block, ...], ...]
    max_position: int  # tokens the checkpoint was made for
    ropes: tuple[RopeSpec, ...] = ()  # rotary tables that blocks name by number
    embedding: EmbeddingSpec = EmbeddingSpec()
    head: HeadSpec = HeadSpec()
    tie_word_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    prefix: PrefixSpec | None = None  # where blocks have a prefix mask
    overflows_float16: bool = False  # trained weights take hidden states beyond 65,504
    share: Share | None = None  # None: it is whole
    vision: VisionSpec | None = None  # the tower whose rows stand for pictures in prompts
    makes_text: bool = True  # it has a head whose logits are of the next token
    state_dtype: str = "float32"  # of states that may be rounded

    def __post_init__(self) -> None:
        for index, layer in enumerate(self.layers):
            if any(block.cache_rows or block.states for block in layer[1:]):
                raise ValueError(f"layer {index}: only its first block may keep rows, or a state")
            if layer[0].reads_before:
                raise ValueError(f"layer {index}: its first block is parallel to none")
        if not any(self.kept):
            raise ValueError(
                "no layer keeps rows in the cache (allowed: one layer and more that do)"
            )
        self.rotary_dims  # noqa: B018  # raises

    def blocks(self) -> Iterator[Block]:
        for layer in self.layers:
            yield from layer

    @cached_property
    def kept(self) -> tuple[tuple[CacheRows, ...], ...]:
        """The cache rows of each layer; () for a layer without a cache."""
        return tuple(layer[0].cache_rows for layer in self.layers)

    @cached_property
    def states(self) -> tuple[tuple[StateTensor, ...], ...]:
        """What each layer keeps of a request beside the cache; () for a layer without a state."""
        return tuple(
            tuple(
                each._replace(dtype=self.state_dtype) if each.may_round else each
                for each in layer[0].states
            )
            for layer in self.layers
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of all states of one request."""
        return sum(
            DTYPE_BYTES[each.dtype] * math.prod(each.shape)
            for layer in self.states
            for each in layer
        )

    @cached_property
    def rotary_dims(self) -> tuple[int, ...]:
        """The width R of each of the rotary tables.

        Raises ValueError for a table of whole heads that blocks with other sizes of head name.
        """
        return tuple(
            rope.rotary_dim or self._rotated(table) for table, rope in enumerate(self.ropes)
        )

    def _rotated(self, table: int) -> int:
        """Dims of the heads that a table of whole heads rotates; of one that nobody names any."""
        sizes = {
            block.rotated_size
            for block in self.attention
            if table in (block.positions.table, block.positions.query_table)
        }
        if len(sizes) > 1:
            raise ValueError(
                f"rotary table {table} is for heads of {sorted(sizes)} dims (allowed: one size for "
                "each table); give the others a table of their own, or rotary_dim"
            )
        return sizes.pop() if sizes else self.head_dim

    @cached_property
    def attention(self) -> tuple[CachingBlock, ...]:
        """The blocks that keep rows in the cache, in order."""
        return tuple(self.blocks_of(CachingBlock))

    def blocks_of(self, kind: type[Kind]) -> Iterator[Kind]:
        """The blocks of a kind, in order."""
        return (block for block in self.blocks() if isinstance(block, kind))

    def with_blocks(self, kind: type[Kind], change: Callable[[int, Kind], Block]) -> DecoderSpec:
        """The spec with change(layer index, block) in place of each block of the kind."""
        layers = (
            tuple(change(index, each) if isinstance(each, kind) else each for each in layer)
            for index, layer in enumerate(self.layers)
        )
        return replace(self, layers=tuple(layers))

    def with_forms(self, latents: str, states: str = "float32") -> DecoderSpec:
        """The spec with its latent attention computed in this form, its states in that dtype."""
        made = self.with_blocks(Block, lambda _, block: block.in_form(latents))
        made = replace(made, state_dtype=states)
        if self.share is None:
            return made
        whole = self.share.whole.with_forms(latents, states)
        return replace(made, share=replace(self.share, whole=whole))

    @property
    def head_rows(self) -> int:
        """Rows of the embedding's table, and of the head."""
        return self.vocab_size if self.share is None else self.share.num_rows

    def cache_format(self, name: str) -> KvFormat:
        """The format of that name for the network's cache; raises UserError where it has none."""
        formats = min((block.kv_formats for block in self.attention), key=len)
        if name in KV_FORMATS and all(row.name != name for row in formats):
            known = ", ".join(row.name for row in formats)
            raise UserError(
                f"kv_format {name} is of keys and values, and {self.model_type} keeps latents "
                f"(allowed: {known}); set --cachekv_int8_type fp8, or leave it out"
            )
        return kv_format_of(name, formats)

    @property
    def sees_both_ways(self) -> bool:
        """Whether every token sees its whole text: an encoder, which keeps nothing of it."""
        return self.prefix is None and any(
            getattr(block, "prefix_mask", False) for block in self.attention
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_heads(self) -> int:
        """Query heads of the first attention."""
        return self.attention[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Key heads of the first attention."""
        return self.attention[0].cache_rows[0].num_heads

    @property
    def head_dim(self) -> int:
        """Values of a key row of the first attention."""
        return self.attention[0].cache_rows[0].size

    @property
    def intermediate_size(self) -> int:
        """Inner features of the widest MLP, or expert."""
        return max(block.costs.inner_size for block in self.blocks())

    @property
    def max_context(self) -> int:
        """Tokens that the checkpoint was made for, its context extension included."""
        longest = self.max_position
        for rope in self.ropes:
            extended = (rope.original_max_position or 0) * rope.factor
            if rope.method in ("linear", "dynamic"):
                extended = self.max_position * rope.factor
            longest = max(longest, int(extended))
        return longest

    @property
    def num_learned_positions(self) -> int | None:
        """Tokens that the table of learned positions has rows for; None without one."""
        table = self.embedding
        return table.num_positions - table.position_offset if table.num_positions else None

    @property
    def num_matmul_weights(self) -> int:
        """Elements of all matrices of layers and LM head, those of all experts included."""
        return self._matmul_weights(
            lambda block, slot: max(slot.num_experts, 1) if isinstance(slot, LinearSlot) else 1
        )

    @property
    def num_active_weights(self) -> int:
        """Elements of the matrices that one token is multiplied by."""
        return self.read_weights(1)

    def read_weights(self, num_tokens: int) -> int:
        """Elements of the matrices that a step of so many tokens reads.

        Of experts the expected number that is chosen, where all are equally likely.
        """

        def count(block: Block, slot: LinearSlot | HeadSlot) -> float:
            num_experts = slot.num_experts if isinstance(slot, LinearSlot) else 0
            return num_experts * block.share_read(num_tokens) if num_experts else 1

        return self._matmul_weights(count)

    def weights_of_experts(self, num_experts: float) -> int:
        """Elements of the matrices that a step reads that chooses this many experts of a layer."""
        return self._matmul_weights(
            lambda _, slot: num_experts if isinstance(slot, LinearSlot) and slot.num_experts else 1
        )

    def _matmul_weights(self, count: Callable[[Block, LinearSlot | HeadSlot], float]) -> int:
        """Elements of the layers' matrices, each times its `count`, and of the LM head."""
        linears = (
            slot.out_features * slot.in_features * count(block, slot)
            for block in self.blocks()
            for slot in block.slots(self.hidden_size)
            if isinstance(slot, (LinearSlot, HeadSlot))
        )
        return round(sum(linears)) + self.head_rows * (self.head.width or self.hidden_size)
