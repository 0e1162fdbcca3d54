"""The input rows of an expert block that calibration keeps, and the experts of each.

An expert's statistics are of its own rows. They are made of the kept rows for one expert at a time:
the second moments of all experts would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quant.grids import Array
from quant.layer import Routed

# Fewest rows for second moments, as a share of a product's inputs. In 4 bits, with 512 inputs whose
# variances fall as 1 / i, GPTQ's error on other inputs is 0.77 of rounding to nearest with a
# sixteenth, 0.93 with an eighth of that; with flatter ones it is above 1 with both.
FEWEST_ROWS = 1 / 16


@dataclass
class RoutedRows:
    """The inputs of one expert block and their experts, of the first batches."""

    max_batches: int
    batches: list[Routed] = field(default_factory=list)

    def update(self, routed: Routed | None) -> None:
        """Takes one batch."""
        if routed is not None and len(self.batches) < self.max_batches:
            self.batches.append(routed)

    def of(self, expert: int) -> Iterator[Array]:
        """The rows [n, H] that the router sends to an expert, of batches that have some."""
        for batch in self.batches:
            rows = np.flatnonzero((batch.ids == expert).any(axis=1))
            if len(rows):
                yield batch.inputs[rows]

    def rescale(self, scale: Array) -> None:
        """Divides all rows by scale [H]."""
        self.batches = [Routed(batch.inputs / scale, batch.ids) for batch in self.batches]


def least_rows(in_features: int) -> int:
    """Rows from which on second moments [in_features, in_features] are used."""
    return max(1, round(in_features * FEWEST_ROWS))


def named_experts(names: Sequence[str]) -> str:
    """The common part of the names of experts, and their numbers."""
    numbers = ", ".join(name.rpartition(".")[2] for name in names)
    return f"{names[0].rpartition('.')[0]}: {numbers}"
