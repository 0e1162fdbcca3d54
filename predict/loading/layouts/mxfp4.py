"""MXFP4 checkpoints, as gpt-oss is published: experts' matrices in 4 bits, floats to us.

blocks uint8 [N, K / 32, 16], two e2m1 codes a byte, the lower bits first; scales uint8 [N, K / 32]:
a value is e2m1 * 2^(scale - 127). Source: OCP Microscaling Formats (MX) 1.0, 2023.

Every value is a bfloat16 number, and flags round them as those of a dense checkpoint. In groups of
32, weight_only_int8 holds them exactly: twice an e2m1 is a whole number of at most 12. The steps
between e2m1 codes differ, so that weight_only_int4 does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.config.quantization import QuantSettings
from predict.config.schemes import find
from predict.errors import UserError
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts.online import Online
from predict.loading.matrices import round_weight
from predict.loading.sources import WeightSource
from predict.nn.weights import LinearPlan, WeightPlan
from predict.schemes import Quantized, scheme_of

GROUP_SIZE = 32
NO_NUMBER = 255  # of a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by e2m1's three lower bits
VALUES = np.array([*MAGNITUDES, *(-value for value in MAGNITUDES)], np.float32)
PAIRS = np.stack([np.tile(VALUES, 16), np.repeat(VALUES, 16)], axis=1)  # [256, 2] of a byte
EXACT = find("int8").name


class Mxfp4:
    """See Layout. Linears that are stored in float are read by `online`."""

    ignored: tuple[str, ...] = ()
    schemes: frozenset[str] = frozenset()
    is_rounded = True

    def __init__(
        self,
        config: Mapping[str, Any],
        where: str,
        checkpoint: Checkpoint,
        source: WeightSource,
        settings: QuantSettings,
        plan: WeightPlan,
    ):
        """config: the quantization_config, which says nothing of how codes lie."""
        self.checkpoint = checkpoint
        self.online = Online(source, settings, plan)

    def _is_float(self, plan: LinearPlan) -> bool:
        return f"{plan.prefixes[0]}.blocks" not in self.checkpoint.tensors

    def scheme(self, plan: LinearPlan) -> str:
        """See Layout."""
        return self.online.scheme(plan)

    def group_size(self, plan: LinearPlan) -> int:
        """See Layout."""
        return self.online.group_size(plan)

    def expected(self, plan: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """See Layout. Raises UserError where groups do not divide the input features."""
        floats = self.online.expected(plan)
        if self._is_float(plan):
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
        """See Layout."""
        if self._is_float(plan):
            return self.online.read(plan)
        (prefix,), order = plan.prefixes, plan.row_order()
        blocks, exponents = (
            self.checkpoint.read(f"{prefix}.{ending}") for ending in ("blocks", "scales")
        )
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
        if (name, group_size) == (EXACT, GROUP_SIZE):
            codes = (2 * PAIRS).astype(np.int8)[blocks].reshape(shape)
            return Quantized(codes, scale / 2)
        values = PAIRS[blocks].reshape(*scale.shape, GROUP_SIZE)
        values *= scale[:, :, None]
        return scheme_of(name).quantize(_bfloat16(values).reshape(shape), group_size, round_weight)

    def bias(self, plan: LinearPlan) -> Any:
        """See Layout."""
        return self.online.bias(plan)

    def stored_bytes(self, plan: LinearPlan) -> int:
        """See Layout: floats are made, and rounded, on the host."""
        return self.online.stored_bytes(plan) if self._is_float(plan) else 0


def _bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves, which hold all of values of a few bits."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
