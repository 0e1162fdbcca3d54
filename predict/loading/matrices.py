"""What a source gave, arrays on the host or tensors on a GPU: changed where it lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device.place import tensor_at
from predict.nn.shares import Ranges, num_places
from predict.schemes import round_on_host

if TYPE_CHECKING:
    from paddle import Tensor


def round_weight(weight: Any, rule: str, group_size: int) -> tuple[Any, Any, Any]:
    """Codes, scale, and zero or None of weight [N, K]; see predict.schemes.RoundWeight."""
    if isinstance(weight, np.ndarray):
        return round_on_host(weight, rule, group_size)
    from predict.ops import compiled

    return compiled.round_weight(weight, rule, group_size)


def rows_in(order: npt.NDArray[np.int64], matrix: Any) -> Any:
    """The rows `order` of the matrix, contiguous."""
    if isinstance(matrix, np.ndarray):
        return np.ascontiguousarray(matrix[order])
    from predict.ops import compiled

    return compiled.take(matrix, tensor_at(order.astype(np.int32), matrix.place))


def transposed(parts: Sequence[Any]) -> Any:
    """[N, K] of matrices [K, n] that stand one beside the other."""
    if any(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([part.T for part in parts])
    import paddle
    from predict.ops import compiled

    turned = [compiled.transposed(part) for part in parts]
    return turned[0] if len(turned) == 1 else paddle.concat(turned)


def taken(values: Any, ranges: Ranges, axis: int = 0) -> Any:
    """A copy of these places of an axis, one range behind the other."""
    if axis == 0 and not isinstance(values, np.ndarray):
        return _rows_of(values, ranges)
    places = ((*(slice(None),) * axis, slice(*ends)) for ends in ranges)
    parts = [values[place] for place in places]
    if isinstance(values, np.ndarray):
        return np.concatenate(parts, axis=axis)
    import paddle

    return parts[0].contiguous() if len(parts) == 1 else paddle.concat(parts, axis=axis)


def _rows_of(values: Tensor, ranges: Ranges) -> Tensor:
    """Rows of a tensor on a GPU: for several ranges Paddle itself would go by way of the host."""
    import paddle
    from predict.device import cuda

    values = values.contiguous()
    made = paddle.empty([num_places(ranges), *values.shape[1:]], values.dtype)
    stream = cuda.raw_stream(paddle.device.current_stream())
    row_bytes = values.element_size() * math.prod(values.shape[1:])
    target = made.data_ptr()
    for begin, end in ranges:
        num_bytes = (end - begin) * row_bytes
        cuda.copy_bytes(target, values.data_ptr() + begin * row_bytes, num_bytes, stream)
        target += num_bytes
    return made


def padded(values: Any, num_rows: int) -> Any:
    """The rows, and rows of zeros behind them."""
    missing = num_rows - len(values)
    if missing < 1:
        return values
    if isinstance(values, np.ndarray):
        return np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])
    import paddle

    return paddle.concat([values, paddle.zeros([missing, *values.shape[1:]], values.dtype)])
