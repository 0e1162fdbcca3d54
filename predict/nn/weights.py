"""From checkpoint names to the decoder's layers: what is expected, how it is read or made up."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from predict.nn.blocks import (
    AttentionBlock,
    Block,
    ExpertBlock,
    HeadNormSlot,
    HeadSlot,
    LatentAttentionBlock,
    LinearSlot,
    Norm,
    NormSlot,
    TableSlot,
)
from predict.nn.spec import DecoderSpec

JOINED_GATE_UP = "mlp.experts.{expert}.gate_up_proj"
SEPARATE_GATE = ".mlp.experts.0.gate_proj."


@dataclass(frozen=True)
class WeightNames:
    """Names in a family's checkpoints. Linears by prefix (".weight" and ".bias" follow).

    Where a linear has several prefixes, they are stacked along the output features.
    qkv_rows: the order of rows where queries, keys and values have one prefix: "stacked" is all
    queries, all keys, all values; "grouped" is the queries of a key head, its key, its value, then
    the next key head. transposed: matrices are stored [in, out]. qk_norm: prefixes for queries and
    keys where each head has its own factor; with {head} each head has its own tensor.
    expert_gate_up, expert_down: {expert} is the expert's number, also where one tensor holds all
    experts (predict.loading.checkpoint.one_by_one). expert_rows: the order of rows where gate and
    up have one prefix: "stacked" is the gate, then up; "interleaved" alternates them.
    experts_transposed: experts' matrices are stored [in, out]. q_whole replaces q_a, q_a_norm and
    q_b in latent attention without q_lora_rank.
    A layer's third and later blocks have names that begin with "blocks.2." within the layer.
    """

    embedding: str = "model.embed_tokens.weight"
    embedding_norm: str = ""
    embedding_projection: str = ""
    positions: str = ""
    final_norm: str = "model.norm.weight"
    head_projection: str = ""
    head: str = "lm_head"
    layer: str = "model.layers.{layer}."
    attention_norm: str = "input_layernorm.weight"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_rows: Literal["stacked", "grouped"] = "stacked"
    out: tuple[str, ...] = ("self_attn.o_proj",)
    q_norm: str = "self_attn.q_norm.weight"
    k_norm: str = "self_attn.k_norm.weight"
    qk_norm: tuple[str, ...] = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    q_a: tuple[str, ...] = ("self_attn.q_a_proj",)
    q_whole: tuple[str, ...] = ("self_attn.q_proj",)
    kv_a: tuple[str, ...] = ("self_attn.kv_a_proj_with_mqa",)
    q_a_norm: str = "self_attn.q_a_layernorm.weight"
    q_b: tuple[str, ...] = ("self_attn.q_b_proj",)
    kv_a_norm: str = "self_attn.kv_a_layernorm.weight"
    kv_b: tuple[str, ...] = ("self_attn.kv_b_proj",)
    sinks: str = "self_attn.sinks"
    attention_post_norm: str = "post_self_attn_layernorm.weight"
    mlp_norm: str = "post_attention_layernorm.weight"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    mlp_post_norm: str = "post_mlp_layernorm.weight"
    router: str = "mlp.gate.weight"
    router_bias: str = "mlp.gate.bias"
    correction: str = "mlp.gate.e_score_correction_bias"
    correction_is_row: bool = False  # [1, experts]
    expert_gate_up: tuple[str, ...] = (
        "mlp.experts.{expert}.gate_proj",
        "mlp.experts.{expert}.up_proj",
    )
    expert_down: tuple[str, ...] = ("mlp.experts.{expert}.down_proj",)
    expert_rows: Literal["stacked", "interleaved"] = "stacked"
    experts_transposed: bool = False
    shared_gate_up: tuple[str, ...] = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
    shared_down: tuple[str, ...] = ("mlp.shared_experts.down_proj",)
    shared_gate: str = "mlp.shared_expert_gate.weight"
    transposed: bool = False
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    base: str = "model."  # what names begin with, unless a checkpoint leaves it out
    # Substrings of names of tensors that are not read: of a multimodal model's other parts, and of
    # layers behind the last one that draft tokens.
    beside_text: tuple[str, ...] = ()
    drafting: tuple[str, ...] = ()

    def without_layers(self, first: int, count: int) -> WeightNames:
        """The names that leave `count` layers from `first` on unread: they draft tokens."""
        layers = tuple(self.layer.format(layer=first + index) for index in range(count))
        return replace(self, drafting=self.drafting + layers)

    @property
    def unread(self) -> tuple[str, ...]:
        """Substrings of the names of tensors that are not read."""
        return self.ignored + self.beside_text + self.drafting

    def found_in(self, tensors: Collection[str]) -> WeightNames:
        """The variant of these names that matches a checkpoint's tensors."""
        joined = f".{JOINED_GATE_UP}.weight".format(expert=0)
        names = self
        if any(name.endswith(joined) for name in tensors):
            names = self._with_joined_experts()
        elif any(SEPARATE_GATE in name for name in tensors):
            names = self._with_joined_experts().with_separate_experts()
        return names._with_found_base(tensors)

    def with_separate_experts(self) -> WeightNames:
        """The names with an expert's gate and up as two matrices [out, in].

        Quantized checkpoints store them apart, since interleaved rows would reorder the codes.
        """
        if self.expert_gate_up != (JOINED_GATE_UP,):
            return self
        return replace(
            self,
            expert_gate_up=WeightNames().expert_gate_up,
            expert_rows="stacked",
            experts_transposed=False,
        )

    def _with_joined_experts(self) -> WeightNames:
        """The names that transformers 5 writes: an expert's gate and up are one matrix."""
        if self.expert_gate_up == (JOINED_GATE_UP,):
            return self
        default = WeightNames()
        return replace(
            self,
            router=default.router,
            expert_gate_up=(JOINED_GATE_UP,),
            expert_down=default.expert_down,
        )

    def _with_found_base(self, tensors: Collection[str]) -> WeightNames:
        candidates = [self, self._with_base(self.base, "")]
        if self.beside_text:
            candidates = [
                self._with_base("model.", "model.language_model."),
                replace(
                    self._with_base("model.", "language_model.model."),
                    head=f"language_model.{self.head}",
                ),
                self,
            ]
        return next((names for names in candidates if names.embedding in tensors), candidates[0])

    def _with_base(self, base: str, other: str) -> WeightNames:
        """The names with `other` in place of `base` at the beginning."""
        changed: dict[str, Any] = {
            field.name: other + value.removeprefix(base)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), str) and value.startswith(base)
        }
        return replace(self, **changed)

    def of(self, block: Block, slot: str) -> str | tuple[str, ...]:
        """The name of a block's slot, or its names, without the layer's prefix."""
        if isinstance(block, LatentAttentionBlock) and slot == "qkv_a":
            return (self.q_a if block.q_lora_rank else self.q_whole) + self.kv_a
        if slot in ("norm", "post_norm"):
            slot = f"attention_{slot}" if block.cache_rows else f"mlp_{slot}"
        elif isinstance(block, ExpertBlock) and slot in ("gate_up", "down"):
            slot = f"expert_{slot}"
        name: str | tuple[str, ...] = getattr(self, slot)
        return name


@dataclass(frozen=True)
class LinearPlan:
    """One linear of the network: its parts in the checkpoint and its sizes."""

    prefixes: tuple[str, ...]
    part_sizes: tuple[int, ...]  # output features of each part
    in_features: int
    has_bias: bool
    # Rows of the one part are `groups` times [queries, key, value], or [gate, up], of so many
    # values each.
    groups: int = 0
    group_sizes: tuple[int, ...] = ()
    transposed: bool = False  # stored [in, out]
    normalized: bool = False  # rows have length 1, and the stored ones have not
    is_expert: bool = False
    # Rows of each head's parts, where operators multiply by those: it stays in the model's dtype.
    head_parts: tuple[int, ...] = ()

    @property
    def out_features(self) -> int:
        return sum(self.part_sizes)

    @property
    def is_stored_otherwise(self) -> bool:
        """Whether the checkpoint's matrix is not the network's as it is."""
        return self.transposed or self.normalized or self.groups > 0

    def row_order(self) -> npt.NDArray[np.int64] | None:
        """The checkpoint's rows in the network's order; None: the order is the same."""
        if not self.groups:
            return None
        rows = np.arange(self.out_features).reshape(self.groups, -1)
        parts = np.split(rows, np.cumsum(self.group_sizes)[:-1], axis=1)
        return np.concatenate([part.reshape(-1) for part in parts])


@dataclass(frozen=True)
class ExpertsPlan:
    """A linear of each expert, alike in size: a plan for every one."""

    experts: tuple[LinearPlan, ...]


@dataclass(frozen=True)
class TablePlan:
    """A tensor that no scheme stores: its name and its shape in the checkpoint, and its own."""

    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    is_float32: bool  # else of the model's dtype


@dataclass(frozen=True)
class NormPlan:
    """A norm of the network: names of its factor and its bias, and its size."""

    norm: Norm
    weight: str
    bias: str | None
    size: int


@dataclass(frozen=True)
class HeadNormPlan:
    """Norms of heads that have a factor each [heads, size]: tensors one below the other."""

    norm: Norm
    tensors: tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes: [heads, size] or [size]
    size: int


SlotPlan: TypeAlias = LinearPlan | ExpertsPlan | TablePlan | NormPlan | HeadNormPlan


@dataclass(frozen=True)
class BlockPlan:
    """A block of the network, and where each of its slots comes from."""

    block: Block
    slots: Mapping[str, SlotPlan]

    def linears(self) -> Iterator[tuple[str, LinearPlan]]:
        """The linears by slot; of experts one after another."""
        for name, plan in self.slots.items():
            if isinstance(plan, LinearPlan):
                yield name, plan
            elif isinstance(plan, ExpertsPlan):
                for expert in plan.experts:
                    yield name, expert

    def tables(self) -> Iterator[TablePlan]:
        """The tensors that no scheme stores, norms apart."""
        for plan in self.slots.values():
            if isinstance(plan, TablePlan):
                yield plan

    def norms(self) -> Iterator[tuple[str, NormPlan]]:
        """The norms by slot, those of heads with a factor each apart."""
        for name, plan in self.slots.items():
            if isinstance(plan, NormPlan):
                yield name, plan


LayerPlan: TypeAlias = tuple[BlockPlan, ...]


@dataclass(frozen=True)
class WeightPlan:
    """Every tensor that a network needs, by checkpoint name."""

    spec: DecoderSpec
    embedding: str
    positions: str
    embedding_norm: NormPlan | None
    embedding_projection: LinearPlan | None
    final_norm: NormPlan | None
    head_projection: LinearPlan | None
    head: LinearPlan  # with tied embeddings its weight is the embedding's
    layers: tuple[LayerPlan, ...]
    ignored: tuple[str, ...]

    def blocks(self) -> Iterator[BlockPlan]:
        for layer in self.layers:
            yield from layer

    def linears(self) -> Iterator[LinearPlan]:
        """The layers' linears, the head apart."""
        for block in self.blocks():
            for _, linear in block.linears():
                yield linear

    def matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        """Names and shapes of the tables that rows are taken from."""
        spec = self.spec
        yield self.embedding, (spec.vocab_size, spec.embedding.width or spec.hidden_size)
        if spec.embedding.num_positions:
            yield self.positions, (spec.embedding.num_positions, spec.hidden_size)

    def projections(self) -> Iterator[LinearPlan]:
        """Linears between the embedding, the layers and the head."""
        for linear in (self.embedding_projection, self.head_projection):
            if linear is not None:
                yield linear

    def stored_linears(self) -> Iterator[LinearPlan]:
        """All linears with a matrix of their own in the checkpoint."""
        yield from self.linears()
        yield from self.projections()
        if not self.spec.tie_word_embeddings:
            yield self.head

    def norms(self) -> Iterator[NormPlan]:
        for norm in (self.embedding_norm, self.final_norm):
            if norm is not None:
                yield norm
        for block in self.blocks():
            for _, norm in block.norms():
                yield norm

    def small_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the norms' weights and biases, and of tables within blocks."""
        for block in self.blocks():
            for table in block.tables():
                yield table.name, table.stored_shape
        for norm in self.norms():
            yield norm.weight, (norm.size,)
            if norm.bias is not None:
                yield norm.bias, (norm.size,)
        for block in self.blocks():
            for plan in block.slots.values():
                if isinstance(plan, HeadNormPlan):
                    yield from plan.tensors


def plan_weights(spec: DecoderSpec, names: WeightNames) -> WeightPlan:
    """Resolves a family's names for every layer of a spec."""
    hidden = spec.hidden_size

    def norm(kind: Norm, name: str, size: int) -> NormPlan:
        bias = name.removesuffix(".weight") + ".bias" if kind.bias else None
        return NormPlan(kind, name, bias, size)

    def between(kind: Norm | None, name: str) -> NormPlan | None:
        return None if kind is None else norm(kind, name, hidden)

    def head_norm(slot: HeadNormSlot, names: list[str]) -> HeadNormPlan:
        tensors: list[tuple[str, tuple[int, ...]]] = []
        for name, count in zip(names, slot.num_heads, strict=True):
            if "{head}" in name:
                tensors += [(name.format(head=head), (slot.size,)) for head in range(count)]
            else:
                tensors.append((name, (count, slot.size)))
        return HeadNormPlan(slot.norm, tuple(tensors), slot.size)

    def linear(block: Block, slot: LinearSlot, prefixes: tuple[str, ...]) -> LinearPlan:
        sizes, groups, is_expert = slot.part_sizes, 0, slot.num_experts > 0
        group_sizes: tuple[int, ...] = ()
        if len(prefixes) == 1 and len(sizes) > 1:
            if isinstance(block, AttentionBlock) and names.qkv_rows == "grouped":
                groups = block.num_kv_heads
            elif is_expert and names.expert_rows == "interleaved":
                groups = sizes[0]
            group_sizes = tuple(size // groups for size in sizes) if groups else ()
            sizes = (sum(sizes),)
        return LinearPlan(
            prefixes,
            sizes,
            slot.in_features,
            slot.has_bias,
            groups,
            group_sizes,
            names.experts_transposed if is_expert else names.transposed,
            is_expert=is_expert,
        )

    def linears(
        block: Block, slot: LinearSlot, prefixes: tuple[str, ...]
    ) -> LinearPlan | ExpertsPlan:
        if not slot.num_experts:
            return linear(block, slot, prefixes)
        return ExpertsPlan(
            tuple(
                linear(block, slot, tuple(prefix.format(expert=expert) for prefix in prefixes))
                for expert in range(slot.num_experts)
            )
        )

    def table(slot: TableSlot, name: str) -> TablePlan:
        is_row = slot.name == "correction" and names.correction_is_row
        stored = (1, *slot.shape) if is_row else slot.shape
        return TablePlan(name, stored, slot.shape, slot.is_float32)

    def block_plan(index: int, number: int, block: Block) -> BlockPlan:
        at = names.layer.format(layer=index)
        at += f"blocks.{number}." if number > 1 else ""
        slots: dict[str, SlotPlan] = {}
        for slot in block.slots(hidden):
            name = names.of(block, slot.name)
            if isinstance(slot, HeadNormSlot):
                slots[slot.name] = head_norm(slot, [at + part for part in name])
            elif isinstance(slot, NormSlot):
                slots[slot.name] = norm(slot.norm, f"{at}{name}", slot.size)
            elif isinstance(slot, HeadSlot):
                prefixes, sizes = tuple(at + part for part in name), (slot.out_features,)
                slots[slot.name] = LinearPlan(
                    prefixes, sizes, slot.in_features, False, head_parts=slot.part_sizes
                )
            elif isinstance(slot, TableSlot):
                slots[slot.name] = table(slot, f"{at}{name}")
            else:
                slots[slot.name] = linears(block, slot, tuple(at + part for part in name))
        return BlockPlan(block, slots)

    def projection(name: str, size: int | None, in_features: int | None) -> LinearPlan | None:
        if size is None or in_features is None:
            return None
        return LinearPlan((name,), (size,), in_features, False, transposed=names.transposed)

    tied = spec.tie_word_embeddings
    head = names.embedding.removesuffix(".weight") if tied else names.head
    head_width = spec.head.width
    return WeightPlan(
        spec=spec,
        embedding=names.embedding,
        positions=names.positions,
        embedding_norm=between(spec.embedding.norm, names.embedding_norm),
        embedding_projection=projection(names.embedding_projection, hidden, spec.embedding.width),
        final_norm=between(spec.head.norm, names.final_norm),
        head_projection=projection(names.head_projection, head_width, hidden),
        head=LinearPlan(
            (head,),
            (spec.vocab_size,),
            head_width or hidden,
            spec.head.bias,
            normalized=spec.head.normalized,
        ),
        layers=tuple(
            tuple(block_plan(index, number, block) for number, block in enumerate(layer))
            for index, layer in enumerate(spec.layers)
        ),
        # A tied checkpoint may still carry its head; it is the embedding.
        ignored=names.unread + ((names.head,) if tied else ()),
    )
