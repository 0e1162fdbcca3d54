"""Arrays and tensors to where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.errors import UserError

ALIGNED = 4  # elements of 4 bytes, to which kernels may read at once

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.device.devices import Device


def place_tensor(values: Any, dtype: str, place: Any) -> Tensor:
    """`values` (an array, bfloat16 as uint16; or a tensor already there) at a GPU's `place`.

    Converted to `dtype` on the host.
    """
    import paddle

    if not isinstance(values, np.ndarray):
        return values
    tensor = paddle.to_tensor(values, place=paddle.CPUPlace())
    return tensor.astype(dtype)._copy_to(place, True)


def tensor_at(values: Any, place: Any) -> Tensor:
    """An array (or a tensor already there) as a tensor at `place`; None: on the CPU."""
    import paddle

    if not isinstance(values, np.ndarray):
        return values
    tensor = paddle.to_tensor(np.ascontiguousarray(values), place=paddle.CPUPlace())
    return tensor if place is None else tensor._copy_to(place, True)


def tensors_at(arrays: Sequence[npt.NDArray[np.int32]], place: Any) -> list[Tensor]:
    """Arrays of int32, none empty, as tensors at `place`: on a device parts of one copy."""
    if place is None:
        return [tensor_at(each, None) for each in arrays]
    rooms = [-(-each.size // ALIGNED) * ALIGNED for each in arrays]
    flat, start, found = np.zeros(sum(rooms), np.int32), 0, list[Any]()
    for each, room in zip(arrays, rooms, strict=True):
        flat[start : start + each.size] = each.reshape(-1)
        start += room
    whole, start = tensor_at(flat, place), 0
    for each, room in zip(arrays, rooms, strict=True):
        part = whole._slice(start, start + each.size)
        found.append(part.reshape(list(each.shape)) if each.ndim > 1 else part)
        start += room
    return found


def put_row(whole: Tensor, index: int, part: Tensor, gpu: Device | None) -> None:
    """Copies `part` into whole[index], in place; both lie on one device. gpu: that one, or None."""
    import paddle

    if gpu is None:
        paddle.assign(part.unsqueeze(0), whole._slice(index, index + 1))
        return
    size = part.size * part.element_size()
    stream = cuda.current_stream(gpu)
    cuda.copy_bytes(whole.data_ptr() + index * size, part.data_ptr(), size, stream)


def divided(x: Tensor, number: float) -> Tensor:
    """Returns the quotient of x and number, rounded once.

    `x / number` is a division for Paddle's eager mode and in its programs a product with the
    rounded 1 / number: another last bit, and behind codes other tokens.
    """
    import paddle

    return x / paddle.full_like(x, number)


LARGEST = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895313892515355e38, "float16": 65504.0}


def check_holds(dtype: str, values: npt.NDArray[np.float32], what: str, kind: str) -> None:
    """Raises UserError for a value outside the dtype's range. what, kind: names for the message."""
    largest = float(np.abs(values).max(initial=0.0))
    if not largest <= LARGEST[dtype]:
        raise UserError(
            f"{what} has values up to {largest:g}, and {dtype} ends at {LARGEST[dtype]:g}; use "
            f"another --dtype, or train the {kind} again"
        )


def to_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 values of a float array; uint16 is read as bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float32)
