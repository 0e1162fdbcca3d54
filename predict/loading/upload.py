"""Weights from files to a GPU at the speed of the page cache: threads read, pinned buffers copy."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.place import tensor_at, to_float32
from predict.errors import UserError
from predict.loading.arrays import TensorInfo
from predict.loading.checkpoint import Checkpoint
from predict.loading.matrices import taken
from predict.loading.sources import CheckpointSource
from predict.nn.shares import Ranges

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.device.devices import Device

CHUNK_BYTES = 16 << 20
NUM_BUFFERS = 8
NUM_READERS = 8  # one thread reads 3 to 6 GB/s from the page cache, and the bus takes 50
STORED_AS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


class Buffer:
    """Pinned memory, and the copy out of it that must end before it is written again."""

    def __init__(self) -> None:
        self.memory: npt.NDArray[np.uint8] = cuda.pinned([CHUNK_BYTES], np.uint8)
        self.copied = cuda.Event()


class Uploader:
    """Copies tensors of files into tensors on a GPU. Close it when done."""

    def __init__(self, device: Device):
        self._stream = cuda.current_stream(device)
        self._free: deque[Buffer] = deque(Buffer() for _ in range(NUM_BUFFERS))
        self._readers = ThreadPoolExecutor(min(NUM_READERS, os.cpu_count() or 1))
        self._files: dict[Path, int] = {}

    def upload(self, tensor: Tensor, pieces: Iterable[TensorInfo]) -> None:
        """Queues the copy of the pieces, one behind the other, into `tensor`.

        When it returns, all is read and the copies are in the stream. Raises UserError where a
        file is shorter than its header said.
        """
        reads: deque[tuple[Future[None], Buffer, int]] = deque()
        target = tensor.data_ptr()
        for piece in pieces:
            for start in range(0, piece.num_bytes, CHUNK_BYTES):
                if not self._free:
                    target += self._copy(reads.popleft(), target)
                buffer = self._free.popleft()
                buffer.copied.synchronize()
                size = min(CHUNK_BYTES, piece.num_bytes - start)
                read = self._readers.submit(
                    self._read, piece.file, piece.offset + start, buffer.memory[:size]
                )
                reads.append((read, buffer, size))
        while reads:
            target += self._copy(reads.popleft(), target)
        assert target == tensor.data_ptr() + tensor.element_size() * tensor.size

    def _copy(self, read: tuple[Future[None], Buffer, int], target: int) -> int:
        done, buffer, size = read
        try:
            done.result()
            cuda.copy_bytes(target, buffer.memory.ctypes.data, size, self._stream)
            buffer.copied.record(self._stream)
        finally:
            self._free.append(buffer)
        return size

    def _read(self, file: Path, offset: int, memory: npt.NDArray[np.uint8]) -> None:
        descriptor = self._files.get(file)
        if descriptor is None:
            # Two threads may both open it; the dictionary keeps one.
            descriptor = os.open(file, os.O_RDONLY)
            other = self._files.setdefault(file, descriptor)
            if other != descriptor:
                os.close(descriptor)
                descriptor = other
        filled = 0
        while filled < len(memory):
            num_bytes = os.preadv(descriptor, [memory[filled:].data], offset + filled)
            if num_bytes == 0:
                raise UserError(f"{file} ends before its last tensor; copy or download it again")
            filled += num_bytes

    def close(self) -> None:
        """Waits for the copies; frees the buffers and closes the files."""
        self._readers.shutdown(cancel_futures=True)
        for buffer in self._free:
            buffer.copied.synchronize()
        self._free.clear()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()


class DeviceCheckpointSource(CheckpointSource):
    """Weights of a checkpoint; matrices that need no other dtype go straight to the GPU."""

    def __init__(self, checkpoint: Checkpoint, dtype: str, device: Device):
        super().__init__(checkpoint)
        self.dtype = dtype
        self.device = device

    @functools.cached_property
    def uploader(self) -> Uploader:
        """Made for the first matrix: what is checked before must not cost threads and memory."""
        return Uploader(self.device)

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Any:
        if self._stored_as(names) != self.dtype:
            return super().matrix(names, shape)
        return self._uploaded(names, shape, self.dtype)

    def stored_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Tensor:
        dtype = self._stored_as(names)
        if dtype is not None:
            return self._uploaded(names, shape, dtype)
        values = self.checkpoint.read_float(names)
        if values.dtype == np.float64:
            values = to_float32(values)
        return tensor_at(values, self.device.place())

    def part(self, names: tuple[str, ...], rows: Ranges | None, columns: Ranges | None) -> Any:
        """See CheckpointSource. Of columns all are copied to the GPU, and cut there."""
        if self._stored_as(names) != self.dtype:
            return super().part(names, rows, columns)
        found = [info for name in names if (info := self.checkpoint.in_file(name))]
        pieces, first = [], 0
        for info in found:
            count = info.shape[0]
            for begin, end in rows or ((first, first + count),):
                begin, end = max(begin - first, 0), min(end - first, count)
                pieces += [info.rows(begin, end)] if begin < end else []
            first += count
        shape = (sum(piece.shape[0] for piece in pieces), *found[0].shape[1:])
        tensor = self._tensor(pieces, shape, self.dtype)
        return tensor if columns is None else taken(tensor, columns, axis=1)

    def _stored_as(self, names: tuple[str, ...]) -> str | None:
        """The dtype of the matrices; None where their files are not to be copied as they are."""
        found = [self.checkpoint.in_file(name) for name in names]
        dtypes = {None if info is None else STORED_AS.get(info.dtype) for info in found}
        return dtypes.pop() if len(dtypes) == 1 else None

    def _uploaded(self, names: tuple[str, ...], shape: tuple[int, int], dtype: str) -> Tensor:
        found = [info for name in names if (info := self.checkpoint.in_file(name))]
        return self._tensor(found, shape, dtype)

    def _tensor(self, pieces: Iterable[TensorInfo], shape: Iterable[int], dtype: str) -> Tensor:
        import paddle

        tensor = paddle.empty(list(shape), dtype)
        self.uploader.upload(tensor, pieces)
        return tensor

    def close(self) -> None:
        if "uploader" in vars(self):
            self.uploader.close()
