"""Dense checkpoints, rounded while they are read where the flags ask for it; no calibration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from predict.config.quantization import QuantSettings
from predict.config.schemes import scheme_info
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.matrices import round_weight, rows_in, transposed
from predict.loading.sources import RandomSource, WeightSource
from predict.nn.plans import LinearPlan, WeightPlan
from predict.schemes import Quantized, scheme_of

DENSE = "dense"
MIN_LENGTH = 1e-12  # rows of zeros stay zeros


class Online:
    """See Layout. The names are those of a dense checkpoint: prefix.weight, prefix.bias.

    Raises UserError where a name to skip is no linear's, and for a scheme of experts without any.
    """

    ignored: tuple[str, ...] = ()
    is_rounded = True

    def __init__(self, source: WeightSource, settings: QuantSettings, plan: WeightPlan):
        self.source = source
        self.settings = settings
        self.head = plan.head
        linears = [*plan.linears(), plan.head]
        if settings.expert_scheme and not any(linear.is_expert for linear in linears):
            raise UserError(
                f"experts are to be {settings.expert_scheme}, and a model of model_type "
                f"{plan.spec.model_type} has none here; leave --moe_quant_type out, and use a "
                "--quant_type without experts, such as a8w8_fp8"
            )
        names = [prefix for linear in linears for prefix in linear.prefixes]
        for part in settings.skip:
            if not any(part in name for name in names):
                raise UserError(
                    f"--skip_list_names {part} is in the name of no linear (the first ones are "
                    f"{', '.join(names[:7])})"
                )

    def scheme(self, plan: LinearPlan) -> str:
        settings = self.settings
        if plan.head_parts or not plan.is_rounded:
            return DENSE
        if any(part in prefix for part in settings.skip for prefix in plan.prefixes):
            return DENSE
        if plan == self.head:
            return settings.head_scheme or DENSE
        own = settings.expert_scheme if plan.is_expert else None
        return own or settings.scheme or DENSE

    def expected(self, plan: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """See Layout. Raises UserError where the group size does not divide the linear."""
        name = self.scheme(plan)
        info = scheme_info(name)
        if info.group_size is not None and plan.in_features % info.group_size:
            raise UserError(
                f"{name} has groups of {info.group_size} input features, which do not divide the "
                f"{plan.in_features} of {plan.prefixes[0]}; use another --quant_type, or leave the "
                "linear dense with --skip_list_names"
            )
        check_group_size(plan, self.group_size(plan) if info.has_groups else -1)
        return dense_tensors(plan)

    def read(self, plan: LinearPlan) -> Quantized:
        name = self.scheme(plan)
        scheme, group_size = scheme_of(name), self.group_size(plan)
        shape = (plan.out_features, plan.in_features)
        names = tuple(prefix + ".weight" for prefix in plan.prefixes)
        # Heads' parts are cut on the host.
        matrix = self.source.host_matrix if plan.head_parts else self.source.matrix
        if isinstance(self.source, RandomSource):
            if name == DENSE:
                return scheme.quantize(matrix(names, shape), group_size)
            return self.source.quantized(names, scheme, group_size, shape)
        if plan.is_stored_otherwise:
            weight = self._as_used(plan, names, on_host=name == DENSE)
        elif name == DENSE:
            weight = matrix(names, shape)
        else:
            weight = self.source.stored_matrix(names, shape)
        return scheme.quantize(weight, group_size, round_weight)

    def _as_used(self, plan: LinearPlan, names: tuple[str, ...], on_host: bool) -> Any:
        """[out, in] of a matrix that the checkpoint stores in another way.

        on_host: an array, whatever device there is.
        """
        shape = (plan.out_features, plan.in_features)
        if plan.normalized:
            matrix = to_float32(self.source.host_matrix(names, shape))
            lengths = np.linalg.norm(matrix, axis=1, keepdims=True)
            return matrix / np.maximum(lengths, MIN_LENGTH)
        read = self.source.host_matrix if on_host else self.source.stored_matrix
        order = plan.row_order()
        if plan.transposed:
            matrix = transposed([read((name,), size) for name, size in stored_sizes(plan)])
        else:
            matrix = read(names, shape)
        return matrix if order is None else rows_in(order, matrix)

    def group_size(self, plan: LinearPlan) -> int:
        info = scheme_info(self.scheme(plan))
        if info.has_groups:
            return info.group_size or self.settings.group_size
        return self.settings.block_size if info.has_blocks else -1

    def stored_bytes(self, plan: LinearPlan) -> int:
        return self.source.stored_bytes(tuple(prefix + ".weight" for prefix in plan.prefixes))

    def bias(self, plan: LinearPlan) -> Any:
        if not plan.has_bias:
            return None
        names = tuple(prefix + ".bias" for prefix in plan.prefixes)
        values, order = self.source.biases(names, plan.out_features), plan.row_order()
        return values if order is None else values[order]


def check_group_size(plan: LinearPlan, group_size: int) -> None:
    """Raises UserError, naming the linear, where groups do not divide its input features."""
    if group_size != -1 and plan.in_features % group_size:
        raise UserError(
            f"group size {group_size} does not divide the {plan.in_features} input features of "
            f"{plan.prefixes[0]}; use --weightonly_group_size -1 (one scale per output feature), "
            "or leave the linear dense with --skip_list_names"
        )


def dense_tensors(plan: LinearPlan) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a linear's float tensors, biases apart."""
    return dict(stored_sizes(plan))


def stored_sizes(plan: LinearPlan) -> list[tuple[str, tuple[int, int]]]:
    """Names and shapes of a linear's float matrices, as the checkpoint has them."""
    shapes = [(size, plan.in_features) for size in plan.part_sizes]
    return [
        (prefix + ".weight", (columns, rows) if plan.transposed else (rows, columns))
        for prefix, (rows, columns) in zip(plan.prefixes, shapes, strict=True)
    ]
