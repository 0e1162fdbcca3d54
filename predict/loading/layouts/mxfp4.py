"""MXFP4 checkpoints, as gpt-oss is published: experts' matrices in 4 bits, and kept so.

blocks uint8 [N, K / 32, 16], two e2m1 codes a byte, the lower bits first; scales uint8 [N, K / 32]:
a value is e2m1 * 2^(scale - 127). Source: OCP Microscaling Formats (MX) 1.0, 2023.

Where the target has no operators for such codes they become floats: every value is a bfloat16
number. Flags round those as a dense checkpoint's. In groups of 32, weight_only_int8 holds them
exactly: twice an e2m1 is a whole number of at most 12. The steps between e2m1 codes differ, so that
weight_only_int4 does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.config.schemes import find
from predict.errors import UserError
from predict.loading.layouts._stored import EXPONENTS, Stored
from predict.loading.layouts.online import Online
from predict.loading.matrices import round_weight
from predict.nn.plans import LinearPlan
from predict.schemes import Quantized, scheme_of
from predict.schemes.weight_only_mxfp4 import TWICE
from predict.system.settings import refuse_unread

GROUP_SIZE = 32
NO_NUMBER = 255  # of a scale
KEPT, EXACT = find("e2m1").name, find("int8").name
BYTES = np.arange(256)
CODES = np.stack([BYTES & 15, BYTES >> 4], axis=1).astype(np.int8)  # [256, 2] of a byte


class Mxfp4(Stored):
    """See Layout. Linears that are stored in float are read by `online`."""

    schemes: frozenset[str] = frozenset()
    is_rounded = True
    reorders = True

    def __init__(self, config: Mapping[str, Any], where: str, *stored: Any):
        super().__init__(*stored)
        refuse_unread(config, "quant_method", "modules_to_not_convert dequantize", where)
        settings = self.settings
        self.online = Online(self.source, settings, self.plan)
        self.is_asked = settings.scheme is not None or settings.expert_scheme is not None

    def _in_float(self, plan: LinearPlan) -> bool:
        return f"{plan.prefixes[0]}.blocks" not in self.checkpoint.tensors

    def _is_kept(self, plan: LinearPlan) -> bool:
        if self._in_float(plan):
            return False
        if self.is_asked:
            return self.online.scheme(plan) == KEPT
        return self.target.runs(KEPT, GROUP_SIZE, plan.in_features)

    def scheme(self, plan: LinearPlan) -> str:
        return KEPT if self._is_kept(plan) else self.online.scheme(plan)

    def group_size(self, plan: LinearPlan) -> int:
        return GROUP_SIZE if self._is_kept(plan) else self.online.group_size(plan)

    def expected(self, plan: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """See Layout. Raises UserError where groups do not divide the input features."""
        floats = self.online.expected(plan)
        if self._in_float(plan):
            return floats
        (prefix,), rows, columns = plan.prefixes, plan.out_features, plan.in_features
        if columns % GROUP_SIZE:
            raise UserError(
                f"{self.checkpoint.directory}: {prefix} has {columns} input features, and codes of "
                f"MXFP4 come in groups of {GROUP_SIZE}; use an unquantized checkpoint"
            )
        groups = columns // GROUP_SIZE
        return {
            f"{prefix}.blocks": (rows, groups, GROUP_SIZE // 2),
            f"{prefix}.scales": (rows, groups),
        }

    def read(self, plan: LinearPlan) -> Quantized:
        if self._in_float(plan):
            return self.online.read(plan)
        (prefix,), order = plan.prefixes, plan.row_order()
        blocks = self.checkpoint.read_as(f"{prefix}.blocks", "U8")
        exponents = self.checkpoint.read_as(f"{prefix}.scales", "U8", EXPONENTS)
        if (exponents == NO_NUMBER).any():
            raise UserError(
                f"{self.checkpoint.directory}: {prefix}.scales hold "
                f"{np.count_nonzero(exponents == NO_NUMBER)} values that are no numbers; the "
                "checkpoint is damaged: copy it again"
            )
        if order is not None:
            blocks, exponents = blocks[order], exponents[order]
        scale = np.exp2(exponents.astype(np.float32) - 127)
        shape = (plan.out_features, plan.in_features)
        name, group_size = self.scheme(plan), self.group_size(plan)
        if name == KEPT:
            return Quantized(CODES[blocks].reshape(shape), scale)
        twice = TWICE[CODES]
        if (name, group_size) == (EXACT, GROUP_SIZE):
            return Quantized(twice[blocks].reshape(shape), scale / 2)
        values = (twice / np.float32(2))[blocks].reshape(*scale.shape, GROUP_SIZE)
        values *= scale[:, :, None]
        return scheme_of(name).quantize(_bfloat16(values).reshape(shape), group_size, round_weight)


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves, which hold all of values of a few bits."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
