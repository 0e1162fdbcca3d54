"""Sizes that `predict.bench` measures, and their table: the same columns for every case.

A case is REQUESTSxINPUTxOUTPUT: so many requests at once, of INPUT random tokens, each of which
decodes OUTPUT more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from predict.bench.ceilings import share_text
from predict.errors import UserError


@dataclass(frozen=True)
class Case:
    """Sizes of one case: requests at once, and tokens of each."""

    num_requests: int
    input_len: int
    output_len: int

    @property
    def mean_context(self) -> float:
        """Tokens ahead of a decoded one, on average."""
        return self.input_len + self.output_len / 2

    def __str__(self) -> str:
        return f"{self.num_requests}x{self.input_len}x{self.output_len}"


def parse_cases(names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of --cases. Raises UserError for what is none, and for one that stands twice."""
    cases = tuple(_parse(name) for name in names)
    for number, case in enumerate(cases):
        if case in cases[:number]:
            raise UserError(f"--cases has {case} twice; leave one of them out")
    return cases


def _parse(name: str) -> Case:
    sizes = name.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(
            f"--cases has {name!r}; a case is REQUESTSxINPUTxOUTPUT in whole numbers from 1 on, "
            "for example 8x128x256"
        )
    return Case(*(int(size) for size in sizes))


# Metric -> its unit. A rate is better when it is more, a time when it is less.
UNITS = {
    "ttft_ms": "ms",
    "tpot_ms": "ms",
    "input_tokens_per_s": "tokens/s",
    "output_tokens_per_s": "tokens/s",
}
EXPERT_UNITS = {
    "prompt_experts": "distinct experts of a layer and step of prompts",
    "decode_experts": "distinct experts of a layer and step of decoding",
}
DIGITS = {"ttft_ms": 2, "tpot_ms": 3}  # of others 1, and none from 1,000 on
COLUMNS = {"case": 16, "TTFT, ms": 11, "TPOT, ms": 11, "in, tokens/s": 14, "out, tokens/s": 15}
COLUMNS |= {"share of limit": 20, "experts, prompts/decode": 26}  # widths


def cases_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per row of predict.bench.record, after a line of heads.

    All rows have all columns, "-" where a case has no such number; that of experts is left out
    where no row has one.
    """
    widths = [*COLUMNS.values()][1:]
    if not any(name in row["values"] for row in rows for name in EXPERT_UNITS):
        widths.pop()
    lines = []
    for name, *cells in ([*COLUMNS], *map(_cells, rows)):
        shown = (f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=False))
        lines.append(f"{name:<{COLUMNS['case']}}" + "".join(shown))
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    def number(metric: str) -> str:
        value = row["values"].get(metric)
        if value is None:
            return "-"
        return f"{value:,.{DIGITS.get(metric, 1 if value < 1000 else 0)}f}"

    share = row["values"].get("share_of_limit")
    limit = "-" if share is None else f"{share_text(share)} of {row['limit']}"
    return [row["name"], *map(number, UNITS), limit, " / ".join(map(number, EXPERT_UNITS))]
