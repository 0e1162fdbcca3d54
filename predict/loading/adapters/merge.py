"""A checkpoint with an adapter merged into it, tensor by tensor as they are read.

What is added is added in float32, and what is read is float32: rounding to the dtype of the run,
or to codes of a quantized linear, comes after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.adapters.base import BIAS, WEIGHT, Base
from predict.loading.adapters.fit import fitted
from predict.loading.adapters.record import Adapter, LowRank
from predict.loading.adapters.values import Floats, Values
from predict.loading.arrays import FLOAT_DTYPES, Computed, StoredArray, places_of
from predict.loading.checkpoint import Checkpoint, stacked_pieces


def merged(name: str, array: StoredArray, whole: Values | None, linear: LowRank | None) -> Computed:
    """A tensor with what an adapter changes of it: whole stands for it, linear is added to it.

    Raises UserError where it is stored as codes; reading it does for values that are not finite.
    """
    if array.dtype not in FLOAT_DTYPES:
        raise UserError(
            f"the adapter changes {name}, which is stored as {array.dtype}; merge it into the "
            "unquantized checkpoint"
        )

    def read() -> Floats:
        values = array.read() if whole is None else whole.read()
        if linear is None:
            return to_float32(values)
        if name.endswith(BIAS):
            made = linear.added_to_bias(to_float32(values))
        else:
            made = linear.added_to(values)
        if not np.isfinite(made).all():
            raise UserError(
                f"{linear.a.where}: {name} with the adapter merged holds values that are not "
                "finite; the adapter, or the model, is damaged"
            )
        return made

    return Computed("F32", array.shape, array.places, read)


def stacked(pieces: Sequence[StoredArray]) -> Computed:
    """Tensors of one shape, one behind the other along a new first axis."""

    def read() -> Floats:
        whole = np.empty(shape, np.float32)
        for row, piece in zip(whole, pieces, strict=True):
            row[...] = to_float32(piece.read())
        return whole

    shape = (len(pieces), *pieces[0].shape)
    return Computed("F32", shape, places_of(pieces), read)


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
            self.tensors[name] = merged(
                name, self.tensors[name], whole, None if is_bias else linear
            )

    def as_hugging_face(self) -> Mapping[str, StoredArray]:
        arrays: dict[str, StoredArray] = {}
        for name, array in self.under.as_hugging_face().items():
            pieces = stacked_pieces(name, array)
            if self.changed.isdisjoint(pieces):
                arrays[name] = self.tensors.get(name, array)
            else:
                arrays[name] = stacked([self.tensors[piece] for piece in pieces])
        if self.adapter.unties_head:
            arrays[self.base.head] = self.tensors[self.base.head]
        return arrays
