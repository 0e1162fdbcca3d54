"""Tables with a column per row of logits, as a GPU's operators behind the network read them.

A table is [rows, P] int32. Here stands which of its rows holds what: Python and, by the header that
csrc/make_columns.py makes of this module, C++ know them by name alone. Imports no Paddle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

MULTIPLE = 4  # of P: int64s have an even number of int32s, and the next table is aligned


class Column(NamedTuple):
    """One value per row of logits: a row of the table, or two of int64s."""

    name: str
    dtype: str
    meaning: str

    @property
    def num_rows(self) -> int:
        return np.dtype(self.dtype).itemsize // 4


@dataclass(frozen=True)
class ColumnTable:
    """The rows of a table, in order."""

    name: str
    meaning: str
    columns: tuple[Column, ...]

    @property
    def num_rows(self) -> int:
        return sum(column.num_rows for column in self.columns)

    def shape(self, num_logits: int) -> tuple[int, int]:
        """Of a table for so many rows of logits."""
        return self.num_rows, -(-max(num_logits, 1) // MULTIPLE) * MULTIPLE

    def dtype(self, name: str) -> str:
        """The dtype of a column."""
        return next(column.dtype for column in self.columns if column.name == name)

    def views(self, table: npt.NDArray[np.int32]) -> dict[str, npt.NDArray[Any]]:
        """The columns by name, [P] each, in the memory of a contiguous table [rows, P]."""
        views, first = {}, 0
        for column in self.columns:
            rows = table[first : first + column.num_rows].reshape(-1)
            views[column.name] = rows.view(column.dtype)
            first += column.num_rows
        return views


CHOICES = ColumnTable(
    "choices",
    "How a row of logits is drawn from (regatta/sample.h).",
    (
        Column("temperature", "float32", "0: the largest logit"),
        Column("top_k", "int32", "0: all"),
        Column("top_p", "float32", "1: all"),
        Column("min_p", "float32", "0: all"),
        Column("seed", "int64", "key of the row's random number"),
        Column("offset", "int64", "counter of the row's random number"),
        Column("typical_p", "float32", "1: all"),
        Column("num_drafts", "int32", "drafts of the span from this row on: n, n - 1, ..., 0"),
    ),
)
PENALTIES = ColumnTable(
    "penalties",
    "How a row of logits is changed before (regatta/adjust_logits.h).",
    (
        Column("repetition", "float32", "1: unchanged"),
        Column("presence", "float32", "0: unchanged"),
        Column("frequency", "float32", "0: unchanged"),
        Column("slot", "int32", "row of the history and of the rules; -1: nothing changes"),
        Column("length", "int32", "tokens of the sequence up to this row"),
        Column("num_prompt", "int32", "how many of them are the prompt's"),
        Column("num_new", "int32", "how many of them are new in this step"),
        Column("no_repeat_ngram_size", "int32", "0: repeats are allowed"),
    ),
)
TABLES = (CHOICES, PENALTIES)
