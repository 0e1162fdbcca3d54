"""A checkpoint with an adapter merged into it, tensor by tensor as they are read.

What is added is added in float32, and what is read is float32: rounding to the dtype of the run,
or to codes of a quantized linear, comes after.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.adapters.fit import BIAS, WEIGHT, Base, fitted
from predict.loading.adapters.record import Adapter
from predict.loading.adapters.values import Floats
from predict.loading.arrays import FLOAT_DTYPES, Place, Shape, StoredArray
from predict.loading.checkpoint import Checkpoint


@dataclass(frozen=True)
class MergedArray:
    """A tensor as an adapter changes it, float32. See StoredArray."""

    name: str
    array: StoredArray  # what it changes
    adapter: Adapter

    dtype = "F32"

    @property
    def shape(self) -> Shape:
        """See StoredArray."""
        return self.array.shape

    @property
    def places(self) -> tuple[Place, ...]:
        """See StoredArray."""
        return self.array.places

    def read(self) -> Floats:
        """See StoredArray. Raises UserError for values that are not finite then."""
        whole = self.adapter.replaced.get(self.name)
        # Some files give arrays that cannot be written to, and the product is added in place.
        values = whole.read() if whole else np.require(to_float32(self.array.read()), None, "W")
        linear = self.adapter.linears.get(self.name.rpartition(".")[0])
        if linear is None:
            return values
        if self.name.endswith(BIAS):
            return linear.added_to_bias(values)
        if not linear.is_transposed:
            return self._checked(linear.added_to(values))
        merged = linear.added_to(np.ascontiguousarray(values.T))
        return self._checked(np.ascontiguousarray(merged.T))

    def _checked(self, values: Floats) -> Floats:
        if not np.isfinite(values).all():
            raise UserError(
                f"{self.adapter.directory}: {self.name} with the adapter merged holds values that "
                "are not finite; the adapter, or the model, is damaged"
            )
        return values


class MergedCheckpoint(Checkpoint):
    """The checkpoint `under`, changed by an adapter that was fitted to it.

    Raises UserError where the adapter changes what is not stored in float.
    """

    def __init__(self, under: Checkpoint, adapter: Adapter, base: Base):
        self.directory = under.directory
        self.stored, self.is_paddle = under.stored, under.is_paddle
        self.adapter = fitted(adapter, base)
        self.tensors = dict(under.tensors)
        if self.adapter.unties_head:
            self.tensors[base.head] = under.tensors[base.embedding]
        linears = self.adapter.linears
        biases = {name + BIAS for name, linear in linears.items() if linear.bias is not None}
        for name in {*(name + WEIGHT for name in linears), *self.adapter.replaced, *biases}:
            array = self.tensors[name]
            if array.dtype not in FLOAT_DTYPES:
                raise UserError(
                    f"{self.directory}: the adapter changes {name}, which is stored as "
                    f"{array.dtype}; merge it into the unquantized checkpoint"
                )
            self.tensors[name] = MergedArray(name, array, self.adapter)
