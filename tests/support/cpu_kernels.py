"""What the tests of compiled operators share: candidates, tensors of a dtype and back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.library import Library

Array = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

CANDIDATES = ("scalar", "avx2", "avx512", "avx512_bf16", "amx", "amx_fp16")
PAIRED = CANDIDATES[3:]  # multiply bfloat16 in pairs
DTYPES = ("float32", "bfloat16", "float16")


def force(library: Library, spec: str) -> str | None:
    """Forces candidates ("" forces none); returns the library's complaint, if any."""
    function = library.handle.regatta_force_kernel
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_char_p
    message = function(spec.encode())
    return None if message is None else message.decode()


def refusal(library: Library, operator: str, candidate: str) -> str:
    """Why this CPU cannot run the operator's candidate; empty when it can."""
    rows = {row["name"]: row for row in library.info()["kernels"][operator]}
    return "" if rows[candidate]["accepts"] else str(rows[candidate]["reason"])


@contextmanager
def threads(library: Library, count: int) -> Iterator[None]:
    """The operators run on `count` threads inside."""
    before = library.info()["threads"]
    library.set_num_threads(count)
    try:
        yield
    finally:
        library.set_num_threads(before)


def tensor(values: npt.ArrayLike, dtype: str) -> Any:
    import paddle

    return paddle.to_tensor(np.asarray(values, dtype=np.float32)).astype(dtype)


def int32(values: npt.ArrayLike) -> Any:
    import paddle

    return paddle.to_tensor(np.asarray(values, dtype=np.int32))


def numpy32(value: Any) -> Array:
    result: Array = value.astype("float32").numpy()
    return result


def rounded(values: npt.ArrayLike, dtype: str) -> Array:
    """The values as `dtype` holds them."""
    return numpy32(tensor(values, dtype))


def normal(rng: np.random.Generator, *shape: int) -> Array:
    return rng.standard_normal(shape, dtype=np.float32)


def normed(x: npt.ArrayLike, weight: npt.ArrayLike, epsilon: float) -> Wide:
    """RMS norm over the last axis, in float64."""
    wide = np.asarray(x, dtype=np.float64)
    scale: Wide = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return scale * np.asarray(weight, dtype=np.float64)


def packed(library: Library, weight: Array, dtype: str) -> Any:
    """Weight [N, K] as the dense scheme stores it."""
    return library.op("regatta_pack_dense")(tensor(weight, dtype), True, dtype)[0]


Ints = npt.NDArray[np.int64]


def sample(
    library: Library,
    logits: npt.ArrayLike,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    seeds: npt.ArrayLike = 0,
    offsets: npt.ArrayLike = 0,
    min_p: npt.ArrayLike | None = None,
    typical_p: npt.ArrayLike | None = None,
) -> Ints:
    """Scalars hold for every row."""
    import paddle

    rows = np.asarray(logits, np.float32)

    def column(values: npt.ArrayLike, dtype: Any) -> Any:
        return paddle.to_tensor(np.ascontiguousarray(np.broadcast_to(values, len(rows)), dtype))

    out = library.op("regatta_sample")(
        paddle.to_tensor(rows),
        column(temperature, np.float32),
        column(top_k, np.int32),
        column(top_p, np.float32),
        column(seeds, np.int64),
        column(offsets, np.int64),
        None if min_p is None else column(min_p, np.float32),
        None if typical_p is None else column(typical_p, np.float32),
    )[0]
    assert out.dtype == paddle.int32
    result: Ints = out.numpy().astype(np.int64)
    return result
