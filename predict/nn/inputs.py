"""ForwardInputs: everything that one decoder step reads besides weights and caches, from one table.

Dims: T tokens, B requests, L logit rows, M blocks per request. The dynamic call, the exported
program's InputSpecs and the static feeds are all made from `FIELDS`, so they cannot disagree.
Optional fields are there for networks that read them (see predict.nn.places) and None for others,
who then spend nothing on them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from paddle.static import InputSpec

    from paddle import Tensor

# The cache tensors of one layer: key, value, and where the format has them, the scales of both.
LayerCache: TypeAlias = "tuple[Tensor, ...]"


@dataclass(frozen=True)
class Field:
    """One row of the table: a tensor's name, dtype, symbolic shape and meaning."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    meaning: str
    optional: bool = False


FIELDS: tuple[Field, ...] = (
    Field("token_ids", "int32", ("T",), "spans, request after request"),
    Field("positions", "int32", ("T",), "place in the request, or what predict.nn.places gives"),
    Field("slot_mapping", "int32", ("T",), "block_id * block_size + offset; -1 writes nothing"),
    Field("cu_seqlens_q", "int32", ("B+1",), "span borders in T"),
    Field("context_lens", "int32", ("B",), "tokens visible in the cache after this step"),
    Field("block_tables", "int32", ("B", "M"), "block ids, -1 past the end"),
    Field("logit_indices", "int32", ("L",), "rows of T to project to logits"),
    Field("max_lens", "int32", (2,), "longest span, longest context; always in CPU memory"),
    Field("block_positions", "int32", ("T",), "positions in the second dimension", optional=True),
    Field("prefix_lens", "int32", ("B",), "first tokens, which all tokens see", optional=True),
)


def fields_with(optional: Collection[str] = ()) -> tuple[Field, ...]:
    """The rows of `FIELDS` that a network reads: all but optional ones without a name in it."""
    return tuple(field for field in FIELDS if not field.optional or field.name in optional)


class ForwardInputs(NamedTuple):
    """The tensors (or, before upload, NumPy arrays) of `FIELDS`, in its order."""

    token_ids: Any  # [T] int32
    positions: Any  # [T] int32
    slot_mapping: Any  # [T] int32
    cu_seqlens_q: Any  # [B+1] int32
    context_lens: Any  # [B] int32
    block_tables: Any  # [B, M] int32
    logit_indices: Any  # [L] int32
    max_lens: Any  # [2] int32, CPU
    block_positions: Any = None  # [T] int32
    prefix_lens: Any = None  # [B] int32

    @property
    def given(self) -> list[Any]:
        """All but the optional ones that are None, in order."""
        return [value for value in self if value is not None]


def of_fields(fields: Sequence[Field], values: Sequence[Any]) -> ForwardInputs:
    """The inputs whose fields have these values; other fields are optional ones."""
    given = {field.name: value for field, value in zip(fields, values, strict=True)}
    return ForwardInputs(**given)


def to_tensors(inputs: ForwardInputs, place: Any) -> ForwardInputs:
    """Copies NumPy inputs to `place` (max_lens stays on the CPU)."""
    import paddle

    cpu = paddle.CPUPlace()
    return ForwardInputs(
        *(
            None
            if array is None
            else paddle.to_tensor(
                np.ascontiguousarray(array, dtype=field.dtype),
                place=cpu if field.name == "max_lens" else place,
            )
            for field, array in zip(FIELDS, inputs, strict=True)
        )
    )


class HostTensors:
    """CPU tensors of `FIELDS`, filled anew for each step: a tenth of the time of making them."""

    def __init__(self, fields: Sequence[Field] = fields_with()) -> None:
        import paddle

        self._place = paddle.CPUPlace()
        self._tensors = to_tensors(empty_example(fields=fields), self._place)
        self._stores = [
            (field.dtype, index, tensor.get_tensor())
            for index, (field, tensor) in enumerate(zip(FIELDS, self._tensors, strict=True))
            if tensor is not None
        ]

    def filled(self, inputs: ForwardInputs) -> ForwardInputs:
        """The tensors with values and shapes of NumPy `inputs`, until the next call."""
        for dtype, index, store in self._stores:
            store.set(np.ascontiguousarray(inputs[index], dtype=dtype), self._place)
        return self._tensors


def input_specs(fields: Sequence[Field] = fields_with()) -> list[InputSpec]:
    """InputSpecs of `fields` for paddle.jit; every named dimension is dynamic."""
    from paddle.static import InputSpec

    return [
        InputSpec([d if isinstance(d, int) else None for d in f.shape], f.dtype, f.name)
        for f in fields
    ]


def empty_example(
    block_tables_width: int = 1, fields: Sequence[Field] = fields_with()
) -> ForwardInputs:
    """NumPy inputs of the smallest legal step: one token, one request, slot -1."""
    one = np.zeros(1, np.int32)
    optional = {field.name: one for field in fields if field.optional}
    return ForwardInputs(
        token_ids=one,
        positions=one,
        slot_mapping=np.full(1, -1, np.int32),
        cu_seqlens_q=np.array([0, 1], np.int32),
        context_lens=np.ones(1, np.int32),
        block_tables=np.zeros((1, block_tables_width), np.int32),
        logit_indices=one,
        max_lens=np.array([1, 1], np.int32),
        **optional,
    )


def cache_tensors(caches: Sequence[Tensor], per_layer: int) -> list[LayerCache]:
    """Groups the tensors of layer after layer, `per_layer` each, by layer."""
    return [tuple(caches[i : i + per_layer]) for i in range(0, len(caches), per_layer)]
