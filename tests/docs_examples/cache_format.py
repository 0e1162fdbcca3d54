"""int8_affine: a cache of 8 bits with a scale and a minimum for each head and token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from predict.nn.cache_formats import LEAST_RANGE, KvFormat

if TYPE_CHECKING:
    from paddle import Tensor


def quantize(rows: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes round((x - minimum) / scale), scale = (max - min) / 255 of each row."""
    import paddle

    minimum = paddle.min(rows, axis=-1)
    extent = paddle.clip(paddle.max(rows, axis=-1) - minimum, min=LEAST_RANGE)
    values = (rows - minimum.unsqueeze(-1)) * (255.0 / extent).unsqueeze(-1)
    codes = paddle.clip(paddle.round(values), 0.0, 255.0).astype("uint8")
    return codes, paddle.stack([extent / 255.0, minimum], axis=-1)


def unpack(codes: Tensor, scale: Tensor | None, head_dim: int) -> Tensor:
    """Codes times scale plus minimum."""
    assert scale is not None
    return codes.astype("float32") * scale[..., 0:1] + scale[..., 1:2]


ROW = KvFormat("int8_affine", 8, "token", 2, quantize, unpack)
