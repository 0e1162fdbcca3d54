"""Tensors of quantized checkpoints, as other tools write them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.loading.layouts import awq
from predict.loading.layouts._stored import packed
from predict.schemes import Quantized, scheme_of


def rounded(scheme: str, values: npt.NDArray[np.float32], group_size: int) -> Quantized:
    """Weight-only codes with a column of scales at least."""
    made = scheme_of(scheme).quantize(values, group_size)
    zero = None if made.zero is None else made.zero.reshape(len(values), -1)
    return dataclasses.replace(made, scale=made.scale.reshape(len(values), -1), zero=zero)


def values_of(weight: Quantized) -> npt.NDArray[np.float32]:
    """What weight-only codes stand for."""
    num_rows, num_groups = weight.scale.shape
    codes = weight.codes.astype(np.float32).reshape(num_rows, num_groups, -1)
    zero = 0 if weight.zero is None else weight.zero[:, :, None]
    values: npt.NDArray[np.float32] = (codes - zero) * weight.scale[:, :, None]
    return values.reshape(num_rows, -1)


DTYPES = {"float32": "F32", "int32": "I32", "int8": "I8", "uint8": "U8", "int64": "I64"}


def with_dtypes(tensors: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Arrays with safetensors' dtypes, as `write` takes them; those that have one keep it."""
    return {
        name: each if isinstance(each, tuple) else (DTYPES[str(each.dtype)], each)
        for name, each in tensors.items()
    }


def gptq_tensors(prefix: str, weight: Quantized, bits: int) -> dict[str, npt.NDArray[Any]]:
    middle = 0 if bits == 4 else 128
    zero = np.zeros_like(weight.scale) if weight.zero is None else weight.zero
    return {
        prefix + ".qweight": packed(weight.codes.astype(np.int16).T + middle, bits, 0),
        prefix + ".qzeros": packed(zero.T.astype(np.int16) + middle - 1, bits, 1),
        prefix + ".scales": np.ascontiguousarray(weight.scale.T),
    }


def awq_tensors(prefix: str, weight: Quantized) -> dict[str, npt.NDArray[Any]]:
    assert weight.zero is not None

    def words(codes: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        eights = codes.T.reshape(codes.shape[1], -1, 8)[..., awq.ORDER]
        return packed(eights.reshape(codes.shape[1], -1), 4, 1)

    return {
        prefix + ".qweight": words(weight.codes),
        prefix + ".qzeros": words(weight.zero),
        prefix + ".scales": np.ascontiguousarray(weight.scale.T),
    }
