"""What the weight-only schemes share: groups of columns with scales and zeros, and act-order.

Compiled tensors: packed, scales, act, perm. Plain: codes, scale, zero, perm. act is 1 where a CPU's
products leave 16-bit activations as they are, 0 where they become int8 in blocks of 32.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.device.place import tensor_at
from predict.schemes._quantized import (
    Quantized,
    dequantized,
    optional_at,
    weight_tensors,
)

if TYPE_CHECKING:
    from paddle import Tensor


def weight_only_tensors(
    scheme: str, weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    """Scheme.tensors of a scheme."""
    made = weight_tensors(weight, scheme, dtype, compiled, place)
    if compiled is not None:
        made += (tensor_at(np.array([weight.keeps_activations], np.float32), place),)
    return (*made, optional_at(weight.perm, np.int32, place))


def gathered(x: Tensor, perm: Tensor) -> Tensor:
    """The columns of x [T, K] in act-order; `perm` [1] changes nothing."""
    import paddle

    return x if perm.shape[0] == 1 else paddle.index_select(x, perm, axis=1)


def product(x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale, zero, perm = tensors
    return paddle.matmul(gathered(x, perm), dequantized(codes, scale, zero), transpose_y=True)


def plain(tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale, zero, perm = tensors
    return gathered(
        dequantized(codes, scale, zero), perm if perm.shape[0] == 1 else paddle.argsort(perm)
    )
