"""Tensors of an adapter's files, whole or in the parts that tensor parallelism left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.arrays import (
    FLOAT_DTYPES,
    MAX_SHOWN,
    Computed,
    Indices,
    Part,
    Shape,
    StoredArray,
    Turned,
    places_of,
)
from predict.loading.parallel_parts import Split, joined

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Values:
    """A tensor of an adapter, read when it is asked for. Raises UserError where it is no float."""

    name: str  # as its file has it
    parts: tuple[StoredArray, ...]  # one, or until `joined` one of each tensor-parallel rank
    turned: bool = False  # the file's rows are columns here

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.dtype not in FLOAT_DTYPES:
                raise UserError(
                    f"{self.where} has dtype {part.dtype}; an adapter's "
                    f"tensors must be one of {', '.join(FLOAT_DTYPES)}"
                )

    @property
    def shape(self) -> Shape:
        """Rows and columns as they are used; of the first part where there are several."""
        first = self.parts[0].shape
        return first[::-1] if self.turned else first

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.parts[0].places[0][0]}: {self.name[:MAX_SHOWN]}"

    def joined(self, split: Split | None) -> Values:
        """The tensor of all parts, which the ranks have as `split` says.

        Raises UserError where they do not fit together.
        """
        if len(self.parts) == 1:
            return self
        return replace(self, parts=(joined(self.name, self.parts, split),))

    def cut(self, rows: Indices) -> Values:
        (array,) = self.parts
        return Values(self.name, (Part(Turned(array) if self.turned else array, rows),))

    def read(self) -> Floats:
        """The values, an array of its own. Raises UserError for values that are not finite."""
        (array,) = self.parts
        values = to_float32(array.read())
        wrong = int(np.count_nonzero(~np.isfinite(values)))
        if wrong:
            raise UserError(
                f"{self.where} holds {wrong} values that are not finite; the adapter is damaged, "
                "or its training diverged: copy it, or train it, again"
            )
        return np.ascontiguousarray(values.T if self.turned else values)


def below_one_another(name: str, matrices: Sequence[Values]) -> Values:
    """A matrix of others of as many columns."""
    shape = (sum(matrix.shape[0] for matrix in matrices), matrices[0].shape[1])
    return _computed(
        name, matrices, shape, lambda: np.concatenate([matrix.read() for matrix in matrices])
    )


def in_blocks(
    name: str, matrices: Sequence[Values], first_rows: Sequence[int], num_rows: int
) -> Values:
    """A matrix with others in it: from these rows on, one beside the other; else 0."""

    def read() -> Floats:
        whole, column = np.zeros(shape, np.float32), 0
        for matrix, row in zip(matrices, first_rows, strict=True):
            rows, columns = matrix.shape
            whole[row : row + rows, column : column + columns] = matrix.read()
            column += columns
        return whole

    shape = (num_rows, sum(matrix.shape[1] for matrix in matrices))
    return _computed(name, matrices, shape, read)


def _computed(
    name: str, matrices: Sequence[Values], shape: Shape, read: Callable[[], Floats]
) -> Values:
    places = places_of(matrix.parts[0] for matrix in matrices)
    return Values(name, (Computed("F32", shape, places, read),))
