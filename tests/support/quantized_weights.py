"""Quantized weights of random codes, and their product by the CPU's operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.library import Library
from tests.support.cpu_kernels import Array, Wide, int32, tensor

Codes = npt.NDArray[np.int8]
WEIGHT_ONLY = ("weight_only_int8", "weight_only_int4")
BY_TOKEN = ("a8w8", "w4a8")


@dataclass(frozen=True)
class Weight:
    """A quantized matrix [N, K] in canonical form."""

    scheme: str
    codes: Codes  # [N, K]
    scale: Array  # [N, G]
    zero: Array | None  # [N, G]
    group: int  # values of K that share a scale

    def wide(self) -> Wide:
        """(codes - zero) * scale in float64."""
        groups = np.arange(self.codes.shape[1]) // self.group
        usual = 8.0 if is_int4(self.scheme) else 0.0
        zero = np.full_like(self.scale, usual) if self.zero is None else self.zero
        scale = self.scale.astype(np.float64)
        return (self.codes.astype(np.float64) - zero[:, groups]) * scale[:, groups]

    def packed(self, library: Library, dtype: str) -> tuple[Any, Any]:
        """The weight as the kernels read it."""
        import paddle

        codes, scale, zero = (
            None if value is None else paddle.to_tensor(value)
            for value in (self.codes, self.scale, self.zero)
        )
        result, scales = library.op("regatta_pack_quantized")(
            codes, scale, zero, self.scheme, dtype
        )
        return result, scales

    def operand(self, library: Library, dtype: str, *extra: Any) -> list[Any]:
        """All tensors of the scheme; `extra` in place of those that say "none"."""
        num_extra = 3 if self.scheme == "a8w8" else 2
        none = [tensor([0], "float32")] * num_extra
        if self.scheme != "a8w8":
            none[1] = int32([0])
        return [*self.packed(library, dtype), *extra, *none[len(extra) :]]


def is_int4(scheme: str) -> bool:
    return scheme in ("weight_only_int4", "w4a8")


def make_weight(
    rng: np.random.Generator,
    scheme: str,
    num_outputs: int,
    num_inputs: int,
    group: int = 0,
    with_zeros: bool = False,
) -> Weight:
    """Random codes over their whole range; group 0 is one scale per output channel."""
    shape = (num_outputs, num_inputs)
    low, high = (0, 16) if is_int4(scheme) else (-128, 128)
    codes = rng.integers(low, high, shape).astype(np.int8)
    group = group or num_inputs
    scales = (num_outputs, -(-num_inputs // group))
    scale = rng.uniform(0.01, 0.1, scales).astype(np.float32)
    zero = None
    if with_zeros:
        zero = rng.uniform(0, 16, scales).astype(np.float32)
        zero[::2] = np.rint(zero[::2])
    return Weight(scheme, codes, scale, zero, group)


def linear(library: Library, scheme: str, x: Any, operand: list[Any], num_outputs: int) -> Any:
    return library.op("regatta_linear")(x, operand, None, scheme, num_outputs)[0]
