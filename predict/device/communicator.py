"""This process as one of the ranks of a model: the library's communicator, for Python.

The operators sum_ranks and gather_ranks of predict.ops do the same with tensors.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device import library

# By the type of an array, its DType in csrc/include/regatta/types.h.
_TYPES = {"float32": 0, "bfloat16": 1, "uint16": 1, "float16": 2}
HANDLE_BYTES = 64  # of cudaIpcMemHandle_t
NCCL_ID_BYTES = 128  # of ncclUniqueId


def num_bytes(size: int) -> int:
    """Bytes of the memory file of `size` ranks."""
    function = library.require().handle.regatta_communicator_bytes
    function.restype = ctypes.c_int64
    return int(function(ctypes.c_int(size)))


def open_ranks(fd: int, rank: int, size: int) -> None:
    """Makes this process a rank; the memory file has num_bytes(size), all 0 at first.

    Raises LibraryError.
    """
    _call("open", *map(ctypes.c_int, (fd, rank, size)))


def close_ranks() -> None:
    """Makes this process one without ranks again."""
    library.require().handle.regatta_communicator_close()


def open_gpus(gpus: Sequence[int], rank: int, links: int) -> None:
    """Lets this rank's GPU, which is gpus[rank], and the other ranks' write into each other.

    All ranks call it, behind open_ranks; the library is the one for GPUs. links: the slowest
    between two of them, a number of predict.device.devices.LINKS, not 0. Raises LibraryError.
    """
    handle, size = library.require().handle, len(gpus)
    own = np.zeros(HANDLE_BYTES, np.uint8)
    _call("create", ctypes.c_int(gpus[rank]), ctypes.c_int(size), _address(own), of="gpu_ranks")
    every = gather_ranks(own, size)
    ends = handle.regatta_communicator_ends
    ends.restype = ctypes.c_void_p
    numbers = np.array(gpus, np.int32)
    words = (_address(every), _address(numbers), ctypes.c_int(rank), ctypes.c_void_p(ends()))
    _call("open", *words, ctypes.c_int(links), of="gpu_ranks")
    gather_ranks(own, size)  # all are open
    _call("check", of="gpu_ranks")


def wants_nccl(size: int, links: int) -> bool:
    """Whether NCCL is the choice for sums of some size: csrc/cuda/ranks/select.h."""
    function = library.require().handle.regatta_gpu_ranks_want_nccl
    return bool(function(ctypes.c_int(size), ctypes.c_int(links)))


def open_nccl(path: str, gpu: int, rank: int, size: int, alone: bool) -> None:
    """Makes this rank's GPU one of NCCL's. All ranks call it, behind open_ranks.

    alone: no rank reaches another's memory. Raises LibraryError, on all ranks where one has none.
    """
    error = ""
    try:
        _call("find", ctypes.c_char_p(os.fsencode(path)), of="gpu_nccl")
    except library.LibraryError as raised:
        error = str(raised)
    if (missing := np.flatnonzero(gather_ranks(np.array([bool(error)]), size))).size:
        raise library.LibraryError(error or f"rank {missing[0]} has no NCCL")
    own = np.zeros(NCCL_ID_BYTES, np.uint8)
    if rank == 0:
        _call("id", _address(own), of="gpu_nccl")
    first = np.ascontiguousarray(gather_ranks(own, size)[0])
    words = map(ctypes.c_int, (gpu, rank, size))
    _call("open", *words, _address(first), of="gpu_nccl")
    if alone:
        _call("by_nccl", ctypes.c_int(gpu), ctypes.c_int(size), of="gpu_ranks")


def sum_ranks(values: npt.NDArray[Any]) -> None:
    """The sum of all ranks' values (bfloat16 as uint16 too), in place: see regatta/communicator.h.

    Raises LibraryError when the ranks were told to end.
    """
    assert values.flags.c_contiguous
    kind = ctypes.c_int(_TYPES[values.dtype.name])
    _call("sum", _address(values), ctypes.c_int64(values.size), kind)


def gather_ranks(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """All ranks' values [size, ...], in their order. Raises LibraryError likewise."""
    values = np.ascontiguousarray(values)
    every = np.empty((size, *values.shape), values.dtype)
    _call("gather", _address(values), _address(every), ctypes.c_int64(values.nbytes))
    return every


def _address(values: npt.NDArray[Any]) -> ctypes.c_void_p:
    return values.ctypes.data_as(ctypes.c_void_p)


def _call(name: str, *arguments: Any, of: str = "communicator") -> None:
    function = getattr(library.require().handle, f"regatta_{of}_{name}")
    function.restype = ctypes.c_char_p
    error = function(*arguments)
    if error is not None:
        raise library.LibraryError(error.decode())
