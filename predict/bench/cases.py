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
HEADER = (
    f"{'case':<16}{'TTFT, ms':>11}{'TPOT, ms':>11}{'in, tokens/s':>14}{'out, tokens/s':>15}"
    f"{'share of limit':>20}"
)
EXPERT_HEADER = f"{'experts, prompts/decode':>26}"


def number_text(metric: str, value: float | None) -> str:
    """A number of a case as the table has it; "-" for one that the case does not have."""
    if value is None:
        return "-"
    digits = {"ttft_ms": 2, "tpot_ms": 3}.get(metric, 1 if value < 1000 else 0)
    return f"{value:,.{digits}f}"


def cases_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per row of predict.bench.record, after a line of heads.

    All rows have all columns; that of experts is left out where no row has one.
    """
    columns = [(HEADER, _own)]
    if any(name in row["values"] for row in rows for name in EXPERT_UNITS):
        columns.append((EXPERT_HEADER, _experts))
    lines = ["".join(header for header, _ in columns)]
    lines += ["".join(text(row) for _, text in columns) for row in rows]
    return "\n".join(lines)


def _own(row: Mapping[str, Any]) -> str:
    values = row["values"]
    ttft, tpot, read, written = (number_text(name, values.get(name)) for name in UNITS)
    share = values.get("share_of_limit")
    limit = "-" if share is None else f"{share_text(share)} of {row['limit']}"
    return f"{row['name']:<16}{ttft:>11}{tpot:>11}{read:>14}{written:>15}{limit:>20}"


def _experts(row: Mapping[str, Any]) -> str:
    shown = (number_text(name, row["values"].get(name)) for name in EXPERT_UNITS)
    return f"{' / '.join(shown):>26}"
