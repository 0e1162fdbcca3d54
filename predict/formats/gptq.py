"""GPTQ checkpoints as AutoGPTQ, GPTQModel and transformers write them (Frantar et al. 2022).

qweight int32 [K * bits / 32, N] packed along K, qzeros int32 [G, N * bits / 32] packed along N,
scales [G, N], g_idx int32 [K] (optional). checkpoint_format "gptq" stores zero - 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from predict.errors import UserError
from predict.formats._stored import (
    Part,
    Shape,
    Stored,
    grouped,
    in_group_order,
    num_groups,
    parts_of,
    unpacked,
)
from predict.formats.online import DENSE
from predict.nn.weights import LinearPlan
from predict.schemes import Quantized

SCHEMES = {4: "weight_only_int4", 8: "weight_only_int8"}
FORMATS = ("gptq", "gptq_v2")


class Gptq(Stored):
    """See predict.formats.Layout."""

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        """config: the quantization_config. where: for errors."""
        super().__init__(*stored)
        self.bits = config.get("bits", 4)
        self._size = config.get("group_size", -1)
        self.format = config.get("checkpoint_format") or "gptq"
        if self.bits not in SCHEMES:
            raise UserError(f"{where}: GPTQ with {self.bits} bits is not supported (allowed: 4, 8)")
        if self.format not in FORMATS:
            raise UserError(
                f"{where}: checkpoint_format {self.format!r} is not supported (allowed: "
                f"{', '.join(FORMATS)}); convert it with the tool that made it"
            )

    @property
    def schemes(self) -> frozenset[str]:
        """Schemes that quantized linears of this checkpoint have."""
        return frozenset({SCHEMES[self.bits]})

    def part_scheme(self, part: Part) -> str:
        """See Stored."""
        return SCHEMES[self.bits] if part["qweight"] in self.checkpoint.tensors else DENSE

    def scheme(self, plan: LinearPlan) -> str:
        """See Layout. Parts whose columns were ordered differently share no gather: dense."""
        name = super().scheme(plan)
        orders = [self._group_of(part) for part in parts_of(plan)]
        alike = all(np.array_equal(orders[0], order) for order in orders)
        return name if alike or self._in_float(plan) else DENSE

    def part_group_size(self, part: Part) -> int:
        """See Stored."""
        return int(self._size)

    def part_expected(self, part: Part) -> Mapping[str, Shape]:
        """See Stored."""
        rows, columns = part.out_features, part.in_features
        groups = num_groups(part, self._size)
        names: dict[str, Shape] = {
            part["qweight"]: (columns * self.bits // 32, rows),
            part["qzeros"]: (groups, rows * self.bits // 32),
            part["scales"]: (groups, rows),
        }
        if part["g_idx"] in self.checkpoint.tensors:
            names[part["g_idx"]] = (columns,)
        return names

    def _group_of(self, part: Part) -> Any:
        name = part["g_idx"]
        return self.checkpoint.read(name) if name in self.checkpoint.tensors else None

    def read(self, plan: LinearPlan) -> Quantized:
        """See Layout."""
        if self.scheme(plan) != DENSE or self._in_float(plan):
            return super().read(plan)
        parts = [dequantized(self.read_part(part)) for part in parts_of(plan)]
        return Quantized(np.concatenate(parts), None)

    def read_part(self, part: Part) -> Quantized:
        """See Stored."""
        read = self.checkpoint.read
        zeros = read(part["qzeros"])
        if self.format == "gptq":
            # In whole words, as its writers subtracted: a borrow of theirs is this carry.
            ones = np.uint32(0x11111111 if self.bits == 4 else 0x01010101)
            zeros = (zeros.view(np.uint32) + ones).view(np.int32)
        middle = 0 if self.bits == 4 else 128  # int8 holds codes of 8 bits less 128
        codes = unpacked(read(part["qweight"]), self.bits, 0).T.astype(np.int16) - middle
        zero = unpacked(zeros, self.bits, 1).T.astype(np.float32) - middle
        weight = Quantized(
            np.ascontiguousarray(codes, np.int8),
            np.ascontiguousarray(self.scales(part["scales"]).T),
            np.ascontiguousarray(zero) if self.bits == 4 or zero.any() else None,
        )
        group_of = self._group_of(part)
        if group_of is not None:
            weight = in_group_order(weight, group_of, part)
        return grouped(weight, part)


def dequantized(weight: Quantized) -> Any:
    """float32 [N, K] of a weight-only part, columns in their original order."""
    num_rows, num_columns = weight.codes.shape
    groups = weight.scale.shape[1]
    values = weight.codes.astype(np.float32).reshape(num_rows, groups, -1)
    if weight.zero is not None:
        values -= weight.zero[:, :, None]
    values *= weight.scale[:, :, None]
    values = values.reshape(num_rows, num_columns)
    return values if weight.perm is None else values[:, np.argsort(weight.perm)]
