"""float8 e4m3 on any CPU, exactly: 4 exponent and 3 mantissa bits, no infinity, largest 448."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paddle import Tensor

E4M3_MAX = 448.0
DTYPE = "float8_e4m3fn"


def encode(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Bits of the nearest e4m3 numbers, half to even, clipped to +-448."""
    import paddle

    tensor = paddle.to_tensor(values, place=paddle.CPUPlace())
    bits: npt.NDArray[np.uint8] = rounded_bits(tensor).numpy().view(np.uint8)
    return bits


def rounded_bits(x: Tensor) -> Tensor:
    """Float32 x as float8_e4m3fn, half to even, clipped to +-448."""
    import paddle

    return paddle.clip(x, -E4M3_MAX, E4M3_MAX).astype(DTYPE)


def rounded(x: Tensor) -> Tensor:
    """The e4m3 numbers nearest to float32 x, as float32."""
    return rounded_bits(x).astype("float32")


def values_of(bits: Any) -> npt.NDArray[np.float32]:
    """float32 values of e4m3 bits (uint8); 127 and 255 are NaN."""
    return VALUES[bits]


def _value(bits: int) -> float:
    exponent, mantissa = bits >> 3 & 15, bits & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if bits & 128 else size


VALUES = np.array([_value(bits) for bits in range(256)], np.float32)


def as_e4m3(bits: Tensor) -> Tensor:
    """The numbers of bits (uint8) as float8_e4m3fn; a program being traced cannot do this.

    By their values: where Paddle makes no views, it does not view one dtype as another either.
    """
    import paddle

    values = paddle.to_tensor(VALUES[bits.numpy()], place=paddle.CPUPlace()).astype(DTYPE)
    return values if bits.place.is_cpu_place() else values._copy_to(bits.place, True)
