"""a8w8_fp8: float8 e4m3 weights and activations.

Weight scales: one, one per output feature, or one per block of 128 x 128 (DeepSeek-V3's). With
blocks an activation scale belongs to one token and 128 features, else to a token; or it is static.
Compiled tensors: packed, scales, act. Plain: codes (float8_e4m3fn), scale, act.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from predict.device.place import divided
from predict.schemes._e4m3 import E4M3_MAX, as_e4m3, rounded
from predict.schemes._quantized import Quantized, act_tensor, rounded_by, weight_tensors

if TYPE_CHECKING:
    from paddle import Tensor

NAME = "a8w8_fp8"
BLOCK = 128  # rows and columns
quantize = rounded_by("e4m3")  # group_size 128 makes blocks of 128 x 128


def tensors(
    weight: Quantized, dtype: str, compiled: ModuleType | None, place: Any = None
) -> tuple[Tensor, ...]:
    codes, scale = weight_tensors(weight, NAME, dtype, compiled, place)[:2]
    return codes if compiled is not None else as_e4m3(codes), scale, act_tensor(weight, place)


def product(x: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale, act = tensors
    if len(scale.shape) == 2:
        return paddle.matmul(_rounded_blocks(x, act), plain(tensors), transpose_y=True)
    rows, row_scale = _rounded_rows(x, act)
    return paddle.matmul(rows, codes.astype("float32"), transpose_y=True) * row_scale * scale


def plain(tensors: tuple[Tensor, ...]) -> Tensor:
    import paddle

    codes, scale = tensors[:2]
    num_rows, num_columns = codes.shape
    if len(scale.shape) == 1:
        return codes.astype("float32") * scale.unsqueeze(1)
    columns = paddle.repeat_interleave(scale, BLOCK, axis=1)[:, :num_columns]
    if scale.shape[0] != num_rows:
        columns = paddle.repeat_interleave(columns, BLOCK, axis=0)[:num_rows]
    return codes.astype("float32") * columns


def _rounded_rows(x: Tensor, act: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values of x [..., K] and their scales: `act` [1], or [..., 1] where that is not above 0.

    Where it is below 0, its opposite is the largest value of a row, and what is larger saturates.
    """
    import paddle

    largest = paddle.max(paddle.abs(x), axis=-1, keepdim=True)
    largest = paddle.where(act < 0, paddle.minimum(largest, -act), largest)
    dynamic = paddle.where(largest > 0, divided(largest, E4M3_MAX), paddle.ones_like(largest))
    scale = paddle.where(act > 0, act.expand_as(dynamic), dynamic)
    return rounded(x / scale), scale


def _rounded_blocks(x: Tensor, act: Tensor) -> Tensor:
    """X [T, K] after rounding with one scale per token and 128 columns."""
    import paddle

    num_columns = x.shape[1]
    missing = -num_columns % BLOCK
    padded = paddle.nn.functional.pad(x, [0, 0, 0, missing]) if missing else x
    rows, scale = _rounded_rows(padded.reshape([0, -1, BLOCK]), act)
    return (rows * scale).reshape([0, num_columns + missing])[:, :num_columns]
