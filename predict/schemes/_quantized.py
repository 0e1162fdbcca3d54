"""Quantized: one linear's weight as codes and scales, and the tensors that are made of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from predict.device.place import divided, tensor_at
from predict.schemes._rounding import RoundWeight, round_on_host

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True)
class Quantized:
    """A linear's weight W [N, K] as w = (code - zero) * scale, all its parts stacked along N.

    NumPy arrays, or tensors that lie where they are used. G: groups of columns, K / group size; 1
    when a row is one group.
    """

    codes: Any  # [N, K] int8 (4 bits: 0..15; 8 bits: -128..127; bits of e2m1), or uint8 of e4m3
    scale: Any  # float32 [N, G]; [N]; e4m3 also [1], [N, G] or [ceil(N/128), G], G = ceil(K/128)
    zero: Any = None  # float32 [N, G]; None: 0
    act_scale: float | None = None  # x = q * act_scale; None: found in x at run time
    shift: Any = None  # float32 [K]: x' = (x + shift) * smooth is what meets W; None: 0
    smooth: Any = None  # float32 [K]; None: 1
    perm: Any = None  # int32 [K]: column k of codes meets x[perm[k]] (act-order); None: k
    act_limit: float | None = None  # of |x| where x has scales found at run time; e4m3 alone
    keeps_activations: bool = False  # x stays in floating point where a CPU would make it int8


def rounded_by(rule: str) -> Callable[..., Quantized]:
    """Scheme.quantize by a rule of predict.schemes._rounding."""

    def quantize(
        weight: Any, group_size: int, round_weight: RoundWeight = round_on_host
    ) -> Quantized:
        return Quantized(*round_weight(weight, rule, group_size))

    return quantize


def optional_at(values: Any, dtype: type[np.generic], place: Any) -> Tensor:
    """`values` at `place`, or where they are None one zero, which operators read as "none"."""
    return tensor_at(np.zeros(1, dtype) if values is None else values, place)


def weight_tensors(
    weight: Quantized, scheme: str, dtype: str, compiled: ModuleType | None, place: Any
) -> tuple[Tensor, ...]:
    """Compiled: packed, scales. Plain: codes, scale, zero (one 0 where there is none)."""
    codes, scale = tensor_at(weight.codes, place), tensor_at(weight.scale, place)
    if compiled is None:
        return codes, scale, optional_at(weight.zero, np.float32, place)
    zero = None if weight.zero is None else tensor_at(weight.zero, place)
    return compiled.pack_quantized(codes, scale, zero, scheme, dtype)


def act_tensor(weight: Quantized, place: Any) -> Tensor:
    """[1] float32: the static activation scale; not above 0 where it is found at run time.

    Then it is the opposite of act_limit, or 0 without one.
    """
    value = weight.act_scale or -(weight.act_limit or 0.0)
    return tensor_at(np.array([value], np.float32), place)


def dequantized(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """float32 (codes - zero) * scale of integer codes [N, K]; scale [N] or [N, G]."""
    num_rows, num_columns = codes.shape
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    grouped = codes.astype("float32").reshape([num_rows, groups, num_columns // groups])
    if len(zero.shape) == 2:
        grouped = grouped - zero.unsqueeze(2)
    grouped = grouped * scale.reshape([num_rows, groups, 1])
    return grouped.reshape([num_rows, num_columns])


def quantized_rows(x: Tensor, act: Tensor) -> tuple[Tensor, Tensor]:
    """Int8 values (as float32) of x [T, K] and their scales: `act` [1], or [T, 1] where it is 0."""
    import paddle

    limit = 127.0
    largest = paddle.max(paddle.abs(x), axis=-1, keepdim=True)
    dynamic = paddle.where(largest > 0, divided(largest, limit), paddle.ones_like(largest))
    scale = paddle.where(act > 0, act.expand_as(dynamic), dynamic)
    return paddle.clip(paddle.round(x / scale), -limit, limit), scale
