"""Executes steps on a GPU: decode steps replay CUDA graphs, all others run operator by operator.

A graph serves batches up to its size (1, 2, 4, 8, 16, 32, ...), recorded when first needed. Its
inputs lie in one piece of device memory that each step fills with one copy. Rows behind the batch
are padding: they write nothing (slot -1) and read one token of block 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict import cuda
from predict.device import Device
from predict.nn.decoder import Decoder, forward
from predict.nn.inputs import FIELDS, ForwardInputs, LayerCache

if TYPE_CHECKING:
    from paddle import Tensor

ALIGNMENT = 4  # int32s: 16 bytes


def bucket_size(num_seqs: int) -> int:
    """Rows of the graph that runs a batch: the next power of two, or multiple of 32 from 32 on."""
    if num_seqs <= 32:
        return int(1 << max(num_seqs - 1, 0).bit_length())
    return -(-num_seqs // 32) * 32


def is_decode(inputs: ForwardInputs) -> bool:
    """Whether every request has one token and takes part in sampling."""
    num_seqs = len(inputs.context_lens)
    return len(inputs.token_ids) == num_seqs == len(inputs.logit_indices)


class InputBuffer:
    """Inputs of one step: arrays in pinned memory, and tensors in one piece of device memory.

    arrays, tensors: per field of `FIELDS`, but for max_lens, which stays on the CPU.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], host: npt.NDArray[Any], device: Tensor):
        """shapes: of the fields without max_lens. host, device: flat int32, large enough."""
        self.arrays: list[npt.NDArray[Any]] = []
        self.tensors: list[Tensor] = []
        start = 0
        for shape in shapes:
            size = int(np.prod(shape))
            self.arrays.append(host[start : start + size].reshape(shape))
            tensor = device[start : start + size]
            if len(shape) > 1:
                tensor = tensor.reshape(list(shape))
            if tensor.data_ptr() != device.data_ptr() + 4 * start:
                raise RuntimeError("Paddle copied a slice that has to share its tensor's memory")
            self.tensors.append(tensor)
            start += padded(size)


def padded(size: int) -> int:
    """`size` int32s, rounded up so that the next field is aligned."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def num_elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of an InputBuffer's memory."""
    return sum(padded(int(np.prod(shape))) for shape in shapes)


@dataclass(frozen=True)
class DecodeGraph:
    """One recorded decode step."""

    buffer: InputBuffer
    host: npt.NDArray[Any]
    device: Tensor
    graph: cuda.Graph[Any]


class GpuRunner:
    """Runs steps over its own caches. See predict.engine.runner.Runner.

    Logits of a decode step lie in the graph's memory: use them before the next step.
    """

    def __init__(
        self,
        backend: ModuleType,
        decoder: Decoder,
        caches: Sequence[LayerCache],
        device: Device,
        max_length: int,
        block_size: int,
        use_graphs: bool = True,
    ):
        """max_length: tokens of the longest sequence, which bounds every replay of a graph."""
        self.backend = backend
        self.decoder = decoder
        self.caches = caches
        self.device = device
        self.max_length = max_length
        self.max_blocks = -(-max_length // block_size)
        self.pool = cuda.GraphPool(device) if use_graphs else None
        self.graphs: dict[int, DecodeGraph] = {}
        self._stream = cuda.current_stream(device)
        self._copied = cuda.Event()  # the last step's inputs have left the pinned memory
        self._copied.record(self._stream)
        self._host: npt.NDArray[Any] = np.empty(0, np.int32)  # pinned from the first step on

    def execute(self, inputs: ForwardInputs) -> Tensor:
        """See Runner."""
        import paddle

        with paddle.no_grad():
            if self.pool is not None and is_decode(inputs):
                return self._replay(inputs)
            return self._run(inputs)

    def _run(self, inputs: ForwardInputs) -> Tensor:
        import paddle

        shapes = [np.shape(array) for array in inputs[:-1]]
        count = num_elements(shapes)
        self._copied.synchronize()
        if len(self._host) < count:
            self._host = cuda.pinned([2 * count], np.int32)
        host, device = self._host[:count], paddle.empty([count], "int32")
        buffer = InputBuffer(shapes, host, device)
        for array, values in zip(buffer.arrays, inputs[:-1], strict=True):
            array[...] = values
        cuda.copy_to_device(device, host, self._stream)
        self._copied.record(self._stream)
        return self._forward(buffer, int(inputs.max_lens[0]), int(inputs.max_lens[1]))

    def _forward(self, buffer: InputBuffer, max_query_len: int, max_context_len: int) -> Tensor:
        import paddle

        limits = np.array([max_query_len, max_context_len], np.int32)
        tensors = ForwardInputs._make(
            [*buffer.tensors, paddle.to_tensor(limits, place=paddle.CPUPlace())]
        )
        logits, _ = forward(self.backend, self.decoder, tensors, self.caches)
        return logits

    def _replay(self, inputs: ForwardInputs) -> Tensor:
        num_seqs = len(inputs.context_lens)
        size = bucket_size(num_seqs)
        graph = self.graphs.get(size)
        if graph is None:
            graph = self.graphs[size] = self._capture(size)
        self._copied.synchronize()
        token_ids, positions, slots, _, context_lens, tables, _ = graph.buffer.arrays
        token_ids[:num_seqs] = inputs.token_ids
        positions[:num_seqs] = inputs.positions
        slots[:num_seqs] = inputs.slot_mapping
        context_lens[:num_seqs] = inputs.context_lens
        tables[:num_seqs, : inputs.block_tables.shape[1]] = inputs.block_tables
        if num_seqs < size:
            slots[num_seqs:] = -1
            context_lens[num_seqs:] = 1
            positions[num_seqs:] = 0
            tables[num_seqs:, 0] = 0
        cuda.copy_to_device(graph.device, graph.host, self._stream)
        self._copied.record(self._stream)
        graph.graph.replay()
        logits: Tensor = graph.graph.outputs
        return logits if num_seqs == size else logits[:num_seqs]

    def _capture(self, size: int) -> DecodeGraph:
        """Records a step of `size` padding rows."""
        import paddle

        assert self.pool is not None
        shapes: list[tuple[int, ...]] = [
            (size,),
            (size,),
            (size,),
            (size + 1,),
            (size,),
            (size, self.max_blocks),
            (size,),
        ]
        assert len(shapes) == len(FIELDS) - 1
        count = num_elements(shapes)
        host, device = cuda.pinned([count], np.int32), paddle.empty([count], "int32")
        buffer = InputBuffer(shapes, host, device)
        host[:] = 0
        buffer.arrays[2][:] = -1
        buffer.arrays[3][:] = np.arange(size + 1)
        buffer.arrays[4][:] = 1
        buffer.arrays[6][:] = np.arange(size)
        cuda.copy_to_device(device, host, self._stream)
        graph = self.pool.capture(lambda: self._forward(buffer, 1, self.max_length))
        return DecodeGraph(buffer, host, device, graph)
