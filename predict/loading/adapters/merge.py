"""A checkpoint with an adapter merged into it, tensor by tensor as they are read.

What is added is added in float32, and what is read is float32: rounding to the dtype of the run,
or to codes of a quantized linear, comes after.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.adapters.fit import BIAS, WEIGHT, Base, fitted
from predict.loading.adapters.record import Adapter
from predict.loading.adapters.values import Floats
from predict.loading.checkpoint import FLOAT_DTYPES, Checkpoint


class MergedCheckpoint(Checkpoint):
    """The checkpoint `under`, changed by an adapter that was fitted to it.

    Raises UserError where the adapter changes what is not stored in float.
    """

    def __init__(self, under: Checkpoint, adapter: Adapter, base: Base):
        self.directory = under.directory
        self.under = under
        self.adapter = fitted(adapter, base)
        self.tensors = dict(under.tensors)
        self.places: dict[str, str] = {}  # tensors that have another one's bytes in the file
        if self.adapter.unties_head:
            self.places[base.head] = base.embedding
            self.tensors[base.head] = under.tensors[base.embedding]
        linears = self.adapter.linears
        biases = {name + BIAS for name, linear in linears.items() if linear.bias is not None}
        self.changed = {*(name + WEIGHT for name in linears), *self.adapter.replaced, *biases}
        for name in self.changed:
            if self.tensors[name].dtype not in FLOAT_DTYPES:
                raise UserError(
                    f"{self.directory}: the adapter changes {name}, which is stored as "
                    f"{self.tensors[name].dtype}; merge it into the unquantized checkpoint"
                )
            self.tensors[name] = replace(self.tensors[name], dtype="F32")

    def lies_in_file(self, name: str) -> bool:
        """See Checkpoint."""
        return name not in self.changed and self.under.lies_in_file(self.places.get(name, name))

    def read(self, name: str) -> npt.NDArray[Any]:
        """See Checkpoint; float32 for what the adapter changes."""
        place = self.places.get(name, name)
        if name not in self.changed:
            return self.under.read(place)
        whole = self.adapter.replaced.get(name)
        # Some files give arrays that cannot be written to, and the product is added in place.
        values = whole.read() if whole else np.require(self._stored(place), requirements="W")
        linear = self.adapter.linears.get(name.rpartition(".")[0])
        if linear is None:
            return values
        if name.endswith(BIAS):
            return linear.added_to_bias(values)
        if not linear.is_transposed:
            return self._checked(name, linear.added_to(values))
        merged = linear.added_to(np.ascontiguousarray(values.T))
        return self._checked(name, np.ascontiguousarray(merged.T))

    def _stored(self, name: str) -> Floats:
        return to_float32(self.under.read(name))

    def _checked(self, name: str, values: Floats) -> Floats:
        if not np.isfinite(values).all():
            raise UserError(
                f"{self.adapter.directory}: {name} with the adapter merged holds values that are "
                "not finite; the adapter, or the model, is damaged"
            )
        return values
