"""What rounding loses beside what other flags would, said once while a model is loaded."""

from __future__ import annotations

from typing import Any

import numpy as np

from predict.config.engine import EngineConfig
from predict.config.schemes import scheme_info
from predict.device import library
from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.layouts import Layout
from predict.loading.layouts.gguf import Gguf
from predict.loading.layouts.online import Online
from predict.loading.platform import Platform
from predict.loading.sources import RandomSource, WeightSource
from predict.nn.plans import LinearPlan, WeightPlan
from predict.schemes import float_values, scheme_of
from predict.system.notes import LOG

ROWS = 64  # of a matrix that is rounded to see what it loses
GROUP = 32


def check_activations(
    config: EngineConfig, platform: Platform, plan: WeightPlan, layout: Layout
) -> None:
    """Says how linears of weight-only codes take activations, where that loses something.

    Raises UserError where --weight_only_activations asks for what changes nothing.
    """
    asked = config.quantization.weight_only_activations
    infos = [scheme_info(layout.scheme(linear)) for linear in _linears(plan)]
    count = sum(info.may_round_activations for info in infos)
    if not count:
        why = "no linear here is weight_only_int8 or weight_only_int4"
    elif config.model.dtype == "float32":
        why = "float32 is multiplied as it is"
    elif platform.compiled is None or platform.gpu is not None:
        why = "it is of the compiled operators of a CPU"
    else:
        why = ""
    if why and (asked == "int8" or (asked and not count)):
        raise UserError(f"--weight_only_activations {asked} changes nothing: {why}; leave it out")
    if why or config.quantization.settings.keeps_activations:
        return
    by_tiles = library.require().info()["instruction_set"].startswith("amx")
    if not by_tiles or config.model.dtype != "bfloat16":  # tiles take bfloat16 as it is
        LOG.info(
            f"{count} linears of weight-only codes round activations to int8 in blocks of 32; "
            "--weight_only_activations float loses less, and reads prompts slower"
        )


def say_what_groups_would_save(plan: WeightPlan, layout: Layout, source: WeightSource) -> None:
    """Logs what one scale per output feature loses of 4-bit weights, beside groups of 32."""
    if not isinstance(layout, (Online, Gguf)) or isinstance(source, RandomSource):
        return
    rounded = [
        linear
        for linear in _linears(plan)
        if scheme_info(layout.scheme(linear)).codes == "int4"
        and layout.group_size(linear) == -1
        and linear.in_features % GROUP == 0
        and linear.in_features > GROUP
    ]
    plain = [linear for linear in rounded if not linear.is_stored_otherwise]
    if not plain:
        return
    first = plain[0]
    matrix = to_float32(
        source.host_matrix(
            tuple(f"{prefix}.weight" for prefix in first.prefixes),
            (first.out_features, first.in_features),
        )
    )[:ROWS]
    name = layout.scheme(first)
    losses = [_loss(name, matrix, size) for size in (-1, GROUP)]
    LOG.info(
        f"{len(rounded)} linears become {name} with one scale for each output feature, which is "
        f"off by {losses[0]:.1%} of {first.prefixes[0]} (root mean square); "
        f"--weightonly_group_size {GROUP} would be off by {losses[1]:.1%}"
    )


def _linears(plan: WeightPlan) -> tuple[LinearPlan, ...]:
    return (*plan.linears(), plan.head)


def _loss(name: str, matrix: Any, group_size: int) -> float:
    """Root mean square of what rounding changes, of the values' own."""
    values = float_values(name, scheme_of(name).quantize(matrix, group_size))
    return float(np.sqrt(np.mean((values - matrix) ** 2) / max(np.mean(matrix**2), 1e-30)))
