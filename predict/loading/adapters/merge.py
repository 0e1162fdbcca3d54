"""A checkpoint with an adapter merged into it, tensor by tensor as they are read.

What is added is added in float32, and what is read is float32: rounding to the dtype of the run,
or to codes of a quantized linear, comes after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.adapters.base import BIAS, WEIGHT, Base
from predict.loading.adapters.fit import fitted
from predict.loading.adapters.record import Adapter, LowRank
from predict.loading.adapters.values import Floats, Values
from predict.loading.arrays import FLOAT_DTYPES, Place, Shape, StoredArray
from predict.loading.checkpoint import Checkpoint, stacked_pieces


@dataclass(frozen=True, eq=False)
class Merged:
    """A tensor with what an adapter changes of it. Raises UserError where it is stored as codes."""

    name: str
    array: StoredArray
    whole: Values | None  # stands for the tensor
    linear: LowRank | None  # is added to it

    def __post_init__(self) -> None:
        if self.array.dtype not in FLOAT_DTYPES:
            raise UserError(
                f"the adapter changes {self.name}, which is stored as {self.array.dtype}; merge it "
                "into the unquantized checkpoint"
            )

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> Shape:
        return self.array.shape

    @property
    def places(self) -> tuple[Place, ...]:
        return self.array.places

    def read(self) -> Floats:
        """See StoredArray. Raises UserError for values that are not finite."""
        values = self.array.read() if self.whole is None else self.whole.read()
        if self.linear is None:
            return to_float32(values)
        if self.name.endswith(BIAS):
            merged = self.linear.added_to_bias(to_float32(values))
        else:
            merged = self.linear.added_to(values)
        if not np.isfinite(merged).all():
            raise UserError(
                f"{self.linear.a.where}: {self.name} with the adapter merged holds values that are "
                "not finite; the adapter, or the model, is damaged"
            )
        return merged


@dataclass(frozen=True, eq=False)
class Stacked:
    """Tensors of one shape, one behind the other along a new first axis."""

    pieces: tuple[StoredArray, ...]

    @property
    def dtype(self) -> str:
        return "F32"

    @property
    def shape(self) -> Shape:
        return (len(self.pieces), *self.pieces[0].shape)

    @property
    def places(self) -> tuple[Place, ...]:
        return tuple(place for piece in self.pieces for place in piece.places)

    def read(self) -> Floats:
        whole = np.empty(self.shape, np.float32)
        for row, piece in zip(whole, self.pieces, strict=True):
            row[...] = to_float32(piece.read())
        return whole


class MergedCheckpoint(Checkpoint):
    """The checkpoint `under`, changed by an adapter that is fitted to it.

    Raises UserError where the adapter changes what is not stored in float.
    """

    def __init__(self, under: Checkpoint, adapter: Adapter, base: Base):
        self.directory, self.stored = under.directory, under.stored
        self.is_paddle = under.is_paddle
        self.under, self.base = under, base
        self.adapter = fitted(adapter, base)
        self.tensors = dict(under.tensors)
        if self.adapter.unties_head:
            self.tensors[base.head] = under.tensors[base.embedding]
        linears = self.adapter.linears
        biases = {name + BIAS for name, linear in linears.items() if linear.bias is not None}
        self.changed = {*(name + WEIGHT for name in linears), *self.adapter.replaced, *biases}
        for name in self.changed:
            whole = self.adapter.replaced.get(name)
            linear = linears.get(name.rpartition(".")[0])
            is_bias = name.endswith(BIAS) and name not in biases
            self.tensors[name] = Merged(
                name, self.tensors[name], whole, None if is_bias else linear
            )

    def as_hugging_face(self) -> Mapping[str, StoredArray]:
        arrays: dict[str, StoredArray] = {}
        for name, array in self.under.as_hugging_face().items():
            pieces = stacked_pieces(name, array)
            if self.changed.isdisjoint(pieces):
                arrays[name] = self.tensors.get(name, array)
            else:
                arrays[name] = Stacked(tuple(self.tensors[piece] for piece in pieces))
        if self.adapter.unties_head:
            arrays[self.base.head] = self.tensors[self.base.head]
        return arrays
