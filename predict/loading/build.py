"""From a plan, a source and a layout to the decoder: every weight read, packed and in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.config.schemes import DENSE
from predict.device.place import place_tensor, put_row, tensor_at, to_float32
from predict.errors import UserError
from predict.loading.matrices import padded, taken
from predict.loading.sources import CheckpointSource, WeightSource
from predict.nn.blocks import BlockWeights, HeadMatrices, Linear, NormWeights
from predict.nn.decoder import Decoder, Embedding, Head, Layer, map_tensors
from predict.nn.plans import (
    BlockPlan,
    ExpertsPlan,
    HeadNormPlan,
    LinearPlan,
    NormPlan,
    SlotPlan,
    TablePlan,
    WeightPlan,
)
from predict.nn.rope import rope_table
from predict.schemes import Quantized, float_values, scheme_of

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.device.devices import Device
    from predict.loading.layouts import Layout


@dataclass(frozen=True)
class DecoderBuilder:
    """Reads (or makes up) every weight of a plan, layer by layer, converted to `dtype`."""

    plan: WeightPlan
    source: WeightSource  # of embedding and norms
    layout: Layout  # of the linears, each in a scheme of its own
    dtype: str
    compiled: ModuleType | None  # predict.ops.compiled; None for plain operators
    num_positions: int  # rows of the rotary table (tokens)
    on_layer: Callable[[int], None] | None = None  # called with each finished layer
    place: Any = None  # a GPU's; None for the CPU
    kv_format: str = "dense"  # of the caches that it will run over
    gpu: Device | None = None  # where the place is one
    keeps_activations: bool = False  # see Quantized

    def build(self) -> Decoder:
        """The decoder."""
        plan, spec = self.plan, self.plan.spec
        layers, folds = [], self._folds_norms()
        for index, layer_plan in enumerate(plan.layers):
            layer = tuple(map(self.block, layer_plan))
            layers.append(fold_norms(layer, self.compiled) if folds and self.compiled else layer)
            if self.on_layer:
                self.on_layer(index)
        head = Head(
            spec.head,
            self._norm(plan.final_norm),
            self._linear(plan.head),
            None if plan.head_projection is None else self._linear(plan.head_projection),
            spec.share,
        )
        return Decoder(self._embedding(head), tuple(layers), head, self.ropes())

    def _folds_norms(self) -> bool:
        # float32 is for comparing: there the norms stay apart, as references have them.
        return (
            self.compiled is not None
            and self.place is not None
            and self.dtype != "float32"
            and all(block.folds_norm for block in self.plan.spec.blocks())
            and all(self.layout.scheme(linear) == "dense" for linear in self.plan.linears())
        )

    def _embedding(self, head: Head) -> Embedding:
        plan, spec = self.plan, self.plan.spec
        tables = dict(plan.matrices())
        return Embedding(
            spec.embedding,
            # Rows of a quantized head are no embedding: the table stays beside it.
            None
            if spec.tie_word_embeddings and head.linear.scheme == "dense"
            else self._tensor(self._table_of_tokens(tables[plan.embedding])),
            None if plan.embedding_projection is None else self._linear(plan.embedding_projection),
            self._positions(tables) if plan.positions in tables else None,
            self._norm(plan.embedding_norm),
            spec.share,
        )

    def _table_of_tokens(self, shape: tuple[int, int]) -> Any:
        names, share, source = (self.plan.embedding,), self.plan.spec.share, self.source
        if share is None:
            return source.matrix(names, shape)
        rows = (share.tokens(),)
        if isinstance(source, CheckpointSource):
            return padded(source.part(names, rows, None), shape[0])
        whole = source.matrix(names, (self.plan.spec.vocab_size, shape[1]))
        return padded(taken(whole, rows), shape[0])

    def _positions(self, tables: Mapping[str, tuple[int, int]]) -> Tensor:
        """The rows of positions; of a pair's texts one below the other, each with its type's."""
        plan, source = self.plan, self.source
        name, offset = plan.positions, plan.spec.embedding.position_offset
        if plan.types not in tables:
            return self._tensor(source.matrix((name,), tables[name])[offset:])
        rows, types = (
            to_float32(source.host_matrix((each,), tables[each])) for each in (name, plan.types)
        )
        return self._tensor(np.concatenate([rows[offset:] + row for row in types]))

    def ropes(self) -> tuple[Tensor, ...]:
        """The rotary tables."""
        import paddle

        spec, count = self.plan.spec, self.num_positions
        return tuple(
            paddle.to_tensor(rope_table(rope, dim, count, spec.max_position), place=self.place)
            for dim, rope in zip(spec.rotary_dims, spec.ropes, strict=True)
        )

    def _tensor(self, values: Any) -> Tensor:
        import paddle

        if self.place is not None:
            return place_tensor(values, self.dtype, self.place)
        return paddle.to_tensor(values).astype(self.dtype)

    def _norm(self, plan: NormPlan | None) -> NormWeights | None:
        if plan is None:
            return None

        def values(name: str) -> Tensor:
            whole = self.source.vector(name, plan.size)
            return self._tensor(whole if plan.rows is None else taken(whole, plan.rows))

        return NormWeights(values(plan.weight), plan.bias and values(plan.bias))

    def _head_norm(self, plan: HeadNormPlan) -> NormWeights:
        values = [
            to_float32(self.source.vector(name, math.prod(shape))).reshape(-1, plan.size)
            for name, shape in plan.tensors
        ]
        whole = np.concatenate(values)
        return NormWeights(self._tensor(whole if plan.rows is None else taken(whole, plan.rows)))

    def _linear(self, plan: LinearPlan, of_experts: bool = False) -> Linear:
        name, weight = self.layout.scheme(plan), self.layout.read(plan)
        if of_experts and self.gpu is not None and self.compiled is not None:
            check_gpu_expert(weight, plan)
        weight = replace(weight, keeps_activations=self.keeps_activations)
        tensors = scheme_of(name).tensors(weight, self.dtype, self.compiled, self.place)
        values = self.layout.bias(plan)
        bias = None if values is None else self._tensor(values)
        return Linear(name, tensors, bias, plan.in_features, plan.out_features)

    def _experts(self, plan: ExpertsPlan) -> Linear:
        """One expert after another, each to its place among all: there is no second copy."""
        import paddle

        count, stacked = len(plan.experts), None
        for index, expert in enumerate(plan.experts):
            one = self._linear(expert, of_experts=True)
            if stacked is None:
                stacked = map_tensors(
                    one, lambda _, part: paddle.empty([count, *part.shape], part.dtype)
                )
            if (one.bias is None) != (stacked.bias is None):
                found, others = ("none", "some") if one.bias is None else ("some", "none")
                raise UserError(
                    f"{expert.prefixes[0]} has {found} biases, and the experts before it have "
                    f"{others}; quantize all experts of a layer alike"
                )
            for whole, part in zip(_tensors(stacked), _tensors(one), strict=True):
                if whole.shape[1:] != part.shape:
                    raise UserError(
                        f"{expert.prefixes[0]} has scales, zero points or an order of columns "
                        f"of the shape {list(part.shape)}, and the experts before it of "
                        f"{list(whole.shape[1:])}; quantize all experts of a layer alike"
                    )
                put_row(whole, index, part, self.gpu)
        assert stacked is not None
        return replace(stacked, num_experts=count)

    def _by_head(self, plan: LinearPlan) -> HeadMatrices:
        """The parts of every head; a matrix that the checkpoint quantizes becomes values again."""
        name, weight = self.layout.scheme(plan), self.layout.read(plan)
        values = to_float32(weight.codes) if name == "dense" else float_values(name, weight)
        if self.layout.bias(plan) is not None:
            raise UserError(f"{plan.prefixes[0]} has biases, and no product here adds them")
        key_rows, value_rows = plan.head_parts
        heads = values.reshape(-1, key_rows + value_rows, plan.in_features)
        keys, values = heads[:, :key_rows], heads[:, key_rows:]
        if self.compiled is None:
            return HeadMatrices(self._tensor(keys), self._tensor(values))
        absorbed = np.ascontiguousarray(keys.transpose(0, 2, 1))
        place_all = self._packed if self.place is None else self._tensor
        return HeadMatrices(*map(place_all, (keys, values, absorbed)))

    def _packed(self, matrices: Any) -> Tensor:
        """Matrices [heads, N, K] as the CPU's operators read each."""
        import paddle

        assert self.compiled is not None
        whole = None
        for index, matrix in enumerate(matrices):
            one = self.compiled.pack_dense(
                paddle.to_tensor(np.ascontiguousarray(matrix)), self.dtype
            )
            if whole is None:
                whole = paddle.empty([len(matrices), *one.shape], one.dtype)
            put_row(whole, index, one, None)
        assert whole is not None
        return whole

    def _table(self, plan: TablePlan) -> Tensor:
        size, others = (plan.stored_shape if plan.rows else plan.shape)[0], plan.shape[1:]
        values = self.source.host_matrix((plan.name,), (size, others[0]) if others else (1, size))
        values = values.reshape(size, *others)
        values = values if plan.rows is None else taken(values, plan.rows)
        if plan.is_float32:
            return tensor_at(to_float32(values), self.place)
        return self._tensor(values)

    def slot(self, plan: SlotPlan) -> Linear | HeadMatrices | Tensor | NormWeights | None:
        """The weights of a slot."""
        if isinstance(plan, LinearPlan):
            return self._by_head(plan) if plan.head_parts else self._linear(plan)
        if isinstance(plan, ExpertsPlan):
            return self._experts(plan)
        if isinstance(plan, TablePlan):
            return self._table(plan)
        return self._head_norm(plan) if isinstance(plan, HeadNormPlan) else self._norm(plan)

    def block(self, plan: BlockPlan) -> BlockWeights:
        """The weights of a block."""
        slots = {name: self.slot(part) for name, part in plan.slots.items()}
        return plan.block.weights(slots, self.kv_format, self.place)


def check_gpu_expert(weight: Quantized, plan: LinearPlan) -> None:
    """Raises UserError for an expert whose rows would need changes of its own on a GPU.

    Rows of all experts become codes together there, and keep the order of their columns.
    """
    own = {
        "a static activation scale": weight.act_scale,
        "a shift": weight.shift,
        "smoothing": weight.smooth,
        "columns in act-order": weight.perm,
    }
    found = [name for name, value in own.items() if value is not None]
    if found:
        raise UserError(
            f"{plan.prefixes[0]} has {' and '.join(found)}, which experts have on a CPU alone; "
            "quantize it again without, round the unquantized checkpoint with --quant_type, or use "
            "--device cpu"
        )


def _tensors(linear: Linear) -> tuple[Tensor, ...]:
    """The linear's tensors, its bias among them."""
    return linear.tensors if linear.bias is None else (*linear.tensors, linear.bias)


def fold_norms(layer: Layer, compiled: ModuleType) -> Layer:
    """The layer with its norms' weights multiplied into the matrices behind them, in place.

    A norm is then one factor per row, which the product itself applies.
    """

    def block(weights: Any) -> BlockWeights:
        linears = weights.linears()
        assert weights.norm is not None  # folds_norm
        compiled.fold_norm(linears[weights.block.norm_reader].tensors[0], weights.norm.weight)
        schemes = {n: replace(linear, scheme=DENSE.folded) for n, linear in linears.items()}
        return replace(weights, **schemes)

    return tuple(map(block, layer))


def expected_tensors(plan: WeightPlan, layout: Layout) -> dict[str, tuple[int, ...]]:
    """Checkpoint names and shapes of every tensor of the plan, stored as the layout has it."""
    expected: dict[str, tuple[int, ...]] = dict(plan.matrices())
    expected.update(plan.small_tensors())
    for linear in plan.stored_linears():
        expected.update(layout.expected(linear))
        if linear.has_bias:
            for prefix, size in zip(linear.prefixes, linear.part_sizes, strict=True):
                expected[prefix + ".bias"] = (size,)
    return expected
