"""What calibration keeps of an expert block: rows, and to which experts the router sends them.

Statistics of an expert are of its own rows alone. One expert's are made at a time, of rows that are
kept: second moments of all experts at once would not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from quant.grids import Array
from quant.layer import Routed

# Rows, as a share of a product's inputs, below which second moments say too little. In 4 bits, of
# 512 inputs whose variances fall as 1 / i, GPTQ's error on other inputs is 0.77 of rounding to
# nearest with a sixteenth, 0.93 with an eighth of that; of flatter ones it is above 1 with both.
FEWEST_ROWS = 1 / 16


@dataclass
class RoutedRows:
    """The inputs of one expert block, and where they go, over the first batches."""

    max_batches: int
    batches: list[Routed] = field(default_factory=list)

    def update(self, routed: Routed | None) -> None:
        """Takes one batch."""
        if routed is not None and len(self.batches) < self.max_batches:
            self.batches.append(routed)

    def all(self) -> Iterator[Array]:
        """Every batch's rows [T, H]."""
        for batch in self.batches:
            yield batch.inputs

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
    """Experts by what their names have in common, and their numbers."""
    numbers = ", ".join(name.rpartition(".")[2] for name in names)
    return f"{names[0].rpartition('.')[0]}: {numbers}"
