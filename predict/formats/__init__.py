"""How linears lie in checkpoints, one module per layout, and which of them a directory has.

A layout is recognised from config.json alone. `online` rounds a dense checkpoint while it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from predict.nn.checkpoint import Checkpoint
from predict.nn.hf_config import ConfigReader
from predict.nn.weights import LinearPlan, WeightPlan, WeightSource
from predict.quantization import QuantSettings
from predict.schemes import Quantized

__all__ = ["Layout", "layout_of"]


class Layout(Protocol):
    """Where the linears of one checkpoint come from."""

    ignored: tuple[str, ...]  # parts of names of tensors that need no reading

    def scheme(self, plan: LinearPlan) -> str:
        """The name of the linear's scheme; raises UserError where its parts do not agree."""
        ...

    def expected(self, plan: LinearPlan) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the linear's tensors in the checkpoint, biases apart."""
        ...

    def read(self, plan: LinearPlan) -> Quantized:
        """The linear's weight, all parts stacked; of a dense one the codes are the values."""
        ...

    def bias(self, plan: LinearPlan) -> Any:
        """[out_features], or None."""
        ...


def layout_of(
    reader: ConfigReader,
    checkpoint: Checkpoint,
    source: WeightSource,
    settings: QuantSettings,
    plan: WeightPlan,
) -> Layout:
    """The layout that config.json announces, else a dense one, rounded where `settings` ask for it.

    Raises UserError where config.json names an unknown layout, or contradicts the settings.
    """
    from predict.formats.online import Online

    return Online(source, settings, plan)
