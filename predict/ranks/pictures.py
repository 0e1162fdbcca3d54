"""Pictures over ranks: each encodes some, and all have the rows of all in their tables.

Each rank has the whole tower (vLLM's mm_encoder_tp_mode data): a tower is small beside the text
model, and pictures do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device.place import tensor_at
from predict.engine.pictures import Encode, num_patches
from predict.engine.runner.towers import Passes
from predict.images.pixels import Pixels
from predict.images.placed import Picture, resized_picture
from predict.ranks.messages import Down
from predict.ranks.shared import Arrays

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.ranks.front import Ranks


class Stage(IntEnum):
    """The first number of a message of a pass."""

    BEGIN = 0  # layers of a stage at most (0: all), rows of each picture, rows, values of each
    GO_ON = 1
    SHARE = 2  # the rows of all, at its end


def owners(sizes: Sequence[int], size: int) -> list[int]:
    """The rank of each picture: the one that has the least so far, so that rank 0 has the first."""
    loads, found = [0] * size, list[int]()
    for each in sizes:
        found.append(min(range(size), key=loads.__getitem__))
        loads[found[-1]] += each
    return found


def encode_over(ranks: Ranks) -> Encode:
    """Makes rows of pictures in the tables of all ranks. See predict.engine.pictures.Encode."""

    def write(
        pictures: Sequence[Picture],
        rows: Sequence[npt.NDArray[np.int32]],
        max_layers: int | None = None,
    ) -> Iterator[None]:
        begin = np.array([Stage.BEGIN, max_layers or 0, *map(len, rows)], np.int64)
        (is_over,) = ranks.ask(
            Down.PICTURES, [begin, np.concatenate(rows), *(each.values for each in pictures)]
        )
        while not _is_set(is_over):  # rank 0 has the first picture, and no rank more stages
            yield
            (is_over,) = ranks.ask(Down.PICTURES, [np.array([Stage.GO_ON], np.int64)])
        ranks.ask(Down.PICTURES, [np.array([Stage.SHARE], np.int64)])

    return write


def _is_set(array: Any) -> bool:
    return bool(array[0])


class RankPictures:
    """One rank's part of them."""

    def __init__(
        self, passes: Passes, ops: ModuleType, table: Tensor, levels: int, pixels: Pixels
    ) -> None:
        """table: [rows * levels, W]. pixels: how the model's pictures become patches."""
        self._passes, self._ops, self._table, self._levels = passes, ops, table, levels
        self._pixels = pixels
        self._steps: Iterator[None] = iter(())
        self._made: list[Tensor] = []
        self._rows: list[npt.NDArray[np.int32]] = []  # of each picture
        self._owners: list[int] = []

    def answer_of(self, rank: int, size: int) -> Callable[[list[Any]], Arrays]:
        """What does the messages."""

        def answer(arrays: list[Any]) -> Arrays:
            stage, *numbers = arrays[0].tolist()
            if stage == Stage.SHARE:
                import paddle

                with paddle.no_grad():
                    self._share(rank, size)
                return []
            if stage == Stage.BEGIN:
                self._begin(numbers, arrays[1:], rank, size)
            is_over = next(self._steps, self) is self
            return [np.array([is_over], np.int64)]

        return answer

    def _begin(self, numbers: list[int], arrays: list[Any], rank: int, size: int) -> None:
        most, *counts = numbers
        rows, *values = arrays
        pictures = [resized_picture(b"", each, self._pixels) for each in values]
        self._owners = owners([num_patches(each) for each in pictures], size)
        self._rows = np.split(rows, np.cumsum(counts)[:-1])
        self._made = []
        own = [each for each, owner in zip(pictures, self._owners, strict=True) if owner == rank]
        self._steps = self._passes(own, self._made, most or None) if own else iter(())

    def _share(self, rank: int, size: int) -> None:
        """Writes the rows of all ranks' pictures, in the order of ranks."""
        import paddle

        parts = [
            [rows for rows, owner in zip(self._rows, self._owners, strict=True) if owner == each]
            for each in range(size)
        ]
        counts = [sum(map(len, part)) for part in parts]
        width = self._table.shape[1] * self._levels
        own = paddle.zeros([max(counts) * width], self._table.dtype)
        if self._made:
            values = paddle.concat(self._made, axis=1).reshape([-1])
            paddle.assign(values, own._slice(0, len(values)))
        of_ranks = [count * width for count in counts]
        every = self._ops.gather_ranks(own.reshape([1, -1]), of_ranks)
        rows = np.concatenate([rows for part in parts for rows in part])
        numbers = (rows[:, None] * self._levels + np.arange(self._levels)).astype(np.int32)
        values = every.reshape([-1, self._table.shape[1]])
        self._ops.put_rows(self._table, tensor_at(numbers.reshape(-1), None), values)
        self._made, self._rows, self._owners = [], [], []
