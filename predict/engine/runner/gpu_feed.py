"""The states that a drafter's next step reads on a GPU, where graphs find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.devices import Device

if TYPE_CHECKING:
    from paddle import Tensor


class GpuFeed:
    """See predict.nn.drafters.Feed. States of steps that graphs run lie in memory that stays."""

    def __init__(self, ops: ModuleType, device: Device, size: int):
        """size: rows of the largest step that a graph runs."""
        import paddle

        self.ops, self._device, self._size = ops, device, size
        self._tables: dict[tuple[str, ...], Tensor] = {}  # by taps: [P * size, H], tap after tap
        self._index = paddle.zeros([0], "int32", device=device.place())
        self._pinned: npt.NDArray[Any] = np.empty(0, np.int32)
        self._copied = cuda.Event()  # the last index is copied from the pinned memory
        self._copied.record(cuda.current_stream(device))
        self._large: list[Tensor] = []  # of a step that no graph runs, by tap

    def give(self, hidden: Mapping[str, Tensor], taps: Sequence[str], rows: Sequence[int]) -> None:
        """Takes the states of these taps, of which these rows are the next step's."""
        import paddle

        given, self._large = [hidden[tap] for tap in taps], []
        if max(len(rows), *map(len, given)) > self._size:
            ids = paddle.to_tensor(np.array(rows, np.int32), place=self._device.place())
            given, rows = [self.ops.take(each, ids) for each in given], range(len(rows))
            if len(rows) > self._size:
                self._large = given
                return
        stream = cuda.current_stream(self._device)
        table = self._table(tuple(taps), given[0])
        part = table.size // len(taps) * table.element_size()
        for number, each in enumerate(given):
            num_bytes = each.size * each.element_size()
            cuda.copy_bytes(table.data_ptr() + number * part, each.data_ptr(), num_bytes, stream)
        self._copied.synchronize()
        starts = np.arange(len(taps)) * self._size
        index = self._pinned[: len(rows) * len(taps)]
        index[:] = (np.array(rows)[:, None] + starts).ravel()
        cuda.copy_bytes(self._index.data_ptr(), index.ctypes.data, index.nbytes, stream)
        self._copied.record(stream)

    def _table(self, taps: tuple[str, ...], like: Tensor) -> Tensor:
        import paddle

        if taps not in self._tables:
            shape, place = [len(taps) * self._size, like.shape[1]], self._device.place()
            self._tables[taps] = paddle.zeros(shape, like.dtype, device=place)
            if len(self._pinned) < shape[0]:  # the first taps are those of the model, at least
                self._pinned = cuda.pinned(shape[:1], np.int32)
                self._index = paddle.zeros(shape[:1], "int32", device=place)
        return self._tables[taps]

    def states(self, taps: Sequence[str], num_rows: int) -> Tensor:
        """[num_rows, P * H] of P taps, side by side; padding of a graph takes any."""
        if self._large:
            return self.beside(self._large)
        table = self._tables[tuple(taps)]
        taken = self.ops.take(table, self._index[: num_rows * len(taps)])
        return taken.reshape([num_rows, len(taps) * table.shape[1]])

    def beside(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors [R, H] side by side."""
        import paddle

        if len(parts) == 1:
            return parts[0]
        first, stream = parts[0], cuda.current_stream(self._device)
        shape = [len(parts), *first.shape]
        joined = paddle.empty(shape, first.dtype, device=self._device.place())
        num_bytes = first.size * first.element_size()
        for number, part in enumerate(parts):
            target = joined.data_ptr() + number * num_bytes
            cuda.copy_bytes(target, part.data_ptr(), num_bytes, stream)
        return joined.transpose([1, 0, 2]).contiguous().reshape([shape[1], -1])
