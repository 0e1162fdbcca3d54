"""Pinned memory, overlapping copies, events and CUDA graphs, on streams and tensors of Paddle.

Through the C functions of csrc/device, by ctypes: a call costs about a microsecond. Every function
raises RuntimeError with CUDA's words when CUDA refuses.
"""

from __future__ import annotations

import atexit
import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from predict.device.devices import Device, device_library

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from paddle import Tensor

T = TypeVar("T")
_KEEP_NO_MORE, _KEEP, _ADD_OWNER, _DROP_OWNER = range(4)  # of regatta_device_keep


def _check(status: int) -> None:
    if status:
        raise RuntimeError(device_library().regatta_device_error().decode())


def _created(pointer: int | None) -> int:
    if not pointer:
        raise RuntimeError(device_library().regatta_device_error().decode())
    return pointer


def current_stream(device: Device) -> int:
    """The CUDA stream that Paddle queues this thread's work on."""
    import paddle

    return raw_stream(paddle.device.current_stream(device.place()))


def raw_stream(stream: Any) -> int:
    """The CUDA stream behind a paddle.device.Stream."""
    base = stream.stream_base
    pointer: int = base.raw_stream if hasattr(base, "raw_stream") else base.cuda_stream
    return pointer


def pinned(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """A NumPy array, not initialised, in page-locked memory: copies of it overlap with other work.

    Allocating takes milliseconds: keep it. The memory lives as long as any view of it.
    """
    dtype = np.dtype(dtype)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    handle = device_library()
    pointer = _created(handle.regatta_device_pin(max(num_bytes, 1)))
    memory = (ctypes.c_uint8 * num_bytes).from_address(pointer)
    # Not at exit: the driver frees it, and threads may still copy.
    weakref.finalize(memory, handle.regatta_device_unpin, pointer).atexit = False
    return np.ctypeslib.as_array(memory).view(dtype).reshape(shape)


def copy_bytes(target: int, source: int, num_bytes: int, stream: int) -> None:
    """Queues a copy between two addresses, each of device memory or of pinned memory.

    Pinned memory must not change before the copy is done: record an Event behind it.
    """
    _check(device_library().regatta_device_copy(target, source, num_bytes, stream))


def copy_to_device(tensor: Tensor, array: NDArray[Any], stream: int) -> None:
    """Queues the copy of a pinned, contiguous array into the whole of `tensor`. See copy_bytes."""
    num_bytes = tensor.element_size() * tensor.size
    if num_bytes != array.nbytes or not array.flags.c_contiguous:
        raise ValueError(
            f"the array has {array.nbytes} bytes and the tensor {num_bytes}; they must be alike, "
            "and the array contiguous"
        )
    copy_bytes(tensor.data_ptr(), array.ctypes.data, array.nbytes, stream)


def copy_front_to_host(array: NDArray[Any], tensor: Tensor, stream: int) -> None:
    """Queues the copy of the first bytes of `tensor` into the whole of a pinned array."""
    if array.nbytes > tensor.element_size() * tensor.size:
        raise ValueError(f"the array has {array.nbytes} bytes, more than the tensor")
    if array.nbytes:
        copy_bytes(array.ctypes.data, tensor.data_ptr(), array.nbytes, stream)


def copy(target: Tensor, source: Tensor, stream: int) -> None:
    """Queues the copy of `source` into `target`, tensors on one GPU and of one size in bytes."""
    num_bytes = source.element_size() * source.size
    if target.element_size() * target.size != num_bytes:
        raise ValueError(f"the source has {num_bytes} bytes, the target another number")
    copy_bytes(target.data_ptr(), source.data_ptr(), num_bytes, stream)


def fill_with(tensor: Tensor, pattern: Tensor, stream: int) -> None:
    """Queues copies of `pattern`, one behind the other, into the whole of `tensor` (one dtype)."""
    size, step = tensor.element_size() * tensor.size, pattern.element_size() * pattern.size
    target, source = tensor.data_ptr(), pattern.data_ptr()
    for offset in range(0, size, step):
        copy_bytes(target + offset, source, min(step, size - offset), stream)


class Event:
    """A point in a stream's work."""

    def __init__(self, timing: bool = False):
        """timing: `milliseconds_since` may be asked."""
        handle = device_library()
        self._event = _created(handle.regatta_device_create_event(timing))
        weakref.finalize(self, handle.regatta_device_destroy_event, self._event).atexit = False

    def record(self, stream: int) -> None:
        """Moves the point behind the work that is in `stream` now."""
        _check(device_library().regatta_device_record(self._event, stream))

    def synchronize(self) -> None:
        """Waits until all work before the point is done; other Python threads run meanwhile."""
        _check(device_library().regatta_device_synchronize_event(self._event))

    def milliseconds_since(self, earlier: Event) -> float:
        """Milliseconds from `earlier` to this one; both have timing and are done."""
        elapsed: float = device_library().regatta_device_elapsed(earlier._event, self._event)
        if elapsed < 0:
            raise RuntimeError(device_library().regatta_device_error().decode())
        return elapsed


@contextmanager
def left_queued() -> Iterator[None]:
    """In this context paddle.inference's run does not wait for its stream, on this thread.

    For programs that copy nothing to the host.
    """
    leave = device_library().regatta_device_leave_queued
    before = leave(1)
    try:
        yield
    finally:
        leave(before)


class Graph(Generic[T]):
    """Work that was recorded once and is launched as one. Made by GraphPool.capture.

    outputs: what the recorded function returned; a replay writes the same tensors again.
    num_nodes: kernels, copies and memsets in it.
    """

    def __init__(self, executable: int, num_nodes: int, stream: int, outputs: T):
        self.outputs = outputs
        self.num_nodes = num_nodes
        self._executable = executable
        self._stream = stream
        handle = device_library()
        self._launch = handle.regatta_device_launch_graph
        self._destroy = weakref.finalize(self, handle.regatta_device_destroy_graph, executable)
        self._destroy.atexit = False  # its pool does so, while the device is there

    def replay(self) -> None:
        """Queues the recorded work on the stream that was current when the pool was made."""
        _check(self._launch(self._executable, self._stream))

    def reset(self) -> None:
        """Frees the graph; it cannot be replayed any more."""
        if self._destroy.alive:
            self._destroy()
            del self.outputs


class GraphPool:
    """Graphs that share one piece of memory, apart from everybody else's.

    Paddle gives each stream an allocator of its own. Captures run on a stream that nothing else
    uses, so what a graph needs between its kernels is never given to tensors made later. Two graphs
    of one pool may use the same memory: replay them one after the other, and use or copy a graph's
    outputs before the next replay. Replays are queued on the stream that was current when the pool
    was made.
    """

    def __init__(self, device: Device):
        import paddle

        self.device = device
        self.stream = current_stream(device)
        self._capture_stream = paddle.device.Stream(device.place())
        self._graphs: weakref.WeakSet[Graph[Any]] = weakref.WeakSet()
        self._memory: weakref.finalize[[int, int], GraphPool] | None = None
        # After Paddle's own handlers were registered, so before they run: they unload the plugin.
        atexit.register(_reset, weakref.ref(self))

    def capture(self, function: Callable[[], T], num_warmups: int = 1) -> Graph[T]:
        """The work that `function` queues, recorded.

        It is first run `num_warmups` times: that loads kernels and grows the memory, which a
        recording cannot. The function must do the same work each time, on tensors that stay where
        they are, without waiting for the device and without copies from or to ordinary host memory.
        Raises RuntimeError when something in it cannot be recorded.
        """
        import paddle

        handle, index = device_library(), self.device.index
        raw = raw_stream(self._capture_stream)
        paddle.device.synchronize(self.device.place())  # its inputs may still be on their way
        if self._memory is None:
            handle.regatta_device_keep(index, _ADD_OWNER)
            drop = handle.regatta_device_keep
            self._memory = weakref.finalize(self, drop, index, _DROP_OWNER)
            self._memory.atexit = False
        num_nodes = ctypes.c_uint64()
        handle.regatta_device_keep(index, _KEEP)
        try:
            with paddle.device.stream_guard(self._capture_stream):
                for _ in range(num_warmups):
                    function()
                self._capture_stream.synchronize()
                _check(handle.regatta_device_begin_capture(index, raw))
                try:
                    outputs = function()
                except BaseException:
                    partial = handle.regatta_device_end_capture(index, raw, num_nodes)
                    if partial:
                        handle.regatta_device_destroy_graph(partial)
                    raise
                executable = handle.regatta_device_end_capture(index, raw, num_nodes)
        finally:
            handle.regatta_device_keep(index, _KEEP_NO_MORE)
        graph = Graph(_created(executable), num_nodes.value, self.stream, outputs)
        self._graphs.add(graph)
        return graph

    def reset(self) -> None:
        """Frees all graphs of the pool, and their memory."""
        for graph in list(self._graphs):
            graph.reset()
        if self._memory is not None:
            self._memory()
            self._memory = None


def _reset(pool: weakref.ref[GraphPool]) -> None:
    live = pool()
    if live is not None:
        live.reset()
