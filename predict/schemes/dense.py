"""dense: weights in the model's own dtype, unquantized."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from predict.device.place import place_tensor
from predict.schemes._quantized import Quantized
from predict.schemes._rounding import RoundWeight, round_on_host

if TYPE_CHECKING:
    from paddle import Tensor

NAME = "dense"


def quantize(weight: Any, group_size: int, round_weight: RoundWeight = round_on_host) -> Quantized:
    """See predict.schemes.Scheme. The "codes" are the values themselves."""
    return Quantized(codes=weight, scale=None)


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    import paddle

    if place is not None:
        return (place_tensor(weight.codes, dtype, place),)
    values = paddle.to_tensor(weight.codes)
    if compiled is not None:
        return (compiled.pack_dense(values, dtype),)
    return (values.astype(dtype),)


def product(x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    return paddle.matmul(x, tensors[0].astype("float32"), transpose_y=True)


def plain(tensors: tuple[Tensor, ...]) -> Tensor:
    return tensors[0]
