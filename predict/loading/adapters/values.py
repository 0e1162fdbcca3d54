"""Tensors of an adapter's files, whole or in the parts that tensor parallelism left."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.arrays import FLOAT_DTYPES, MAX_SHOWN, Shape, StoredArray

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Values:
    """A tensor of an adapter, read when it is asked for. Raises UserError where it is no float."""

    name: str  # as its file has it
    parts: tuple[StoredArray, ...]  # one, or one of each tensor-parallel rank
    turned: bool = False  # the file's rows are columns here
    axis: int | None = None  # of the file's tensors, along which the parts follow one another

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.dtype not in FLOAT_DTYPES:
                raise UserError(
                    f"{self.where} has dtype {part.dtype}; an adapter's "
                    f"tensors must be one of {', '.join(FLOAT_DTYPES)}"
                )

    @property
    def shape(self) -> Shape:
        """Rows and columns as they are used; before `fitted_to` those of the first part."""
        first = self.parts[0].shape
        if self.axis is not None:
            sizes = [part.shape[self.axis] for part in self.parts]
            first = (*first[: self.axis], sum(sizes), *first[self.axis + 1 :])
        return first[::-1] if self.turned else first

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.parts[0].places[0][0]}: {self.name[:MAX_SHOWN]}"

    def fitted_to(self, shape: Shape) -> Values | None:
        """The tensor of this shape, whichever way its parts make it up; None where none does."""
        for axis in (None, *range(len(self.parts[0].shape) if len(self.parts) > 1 else 0)):
            fitted = replace(self, axis=axis)
            if fitted.shape == shape and fitted._parts_agree():
                return fitted
        return None

    def _parts_agree(self) -> bool:
        """Whether the parts are alike, but along the axis."""
        shapes = [list(part.shape) for part in self.parts]
        if self.axis is not None:
            for shape in shapes:
                del shape[self.axis : self.axis + 1]
        return all(shape == shapes[0] for shape in shapes)

    def read(self) -> Floats:
        """The values, an array of its own. Raises UserError for values that are not finite."""
        parts = [to_float32(part.read()) for part in self.parts]
        if self.axis is None:
            if not all(np.array_equal(parts[0], part, equal_nan=True) for part in parts[1:]):
                raise UserError(
                    f"{self.where} is one tensor in all {len(parts)} tensor-parallel files, and "
                    "its values differ; the files do not belong together: copy them again"
                )
            values = parts[0]
        else:
            values = np.concatenate(parts, axis=self.axis)
        wrong = int(np.count_nonzero(~np.isfinite(values)))
        if wrong:
            raise UserError(
                f"{self.where} holds {wrong} values that are not finite; the adapter is damaged, "
                "or its training diverged: copy it, or train it, again"
            )
        return np.ascontiguousarray(values.T if self.turned else values)
