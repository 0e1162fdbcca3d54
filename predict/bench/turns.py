"""Two sides that take turns, and how sure the ratio of their numbers is.

What other work does to the machine, and what its host does, then meets both sides alike: each turn
has a ratio of its own. The side that begins changes with every turn.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from predict.bench.record import RecordRow, Suite, repeated_row, suite
from predict.errors import UserError
from predict.system.files import read_json_object

CONFIDENCE = 0.95
LEAST_TURNS = 6  # that give an interval
LAST_LINES = 8  # of what a process that failed has said
# End of a metric's name -> whether more of it is better. Others are no speeds: not compared.
MORE_IS_BETTER = {
    **dict.fromkeys(("_per_s", "_share", "times_as_good"), True),
    **dict.fromkeys(("_ms", "_us", "_s"), False),
}
RATIO = "_times_as_good"
METHOD = (
    "Two sides in turns, each run a process of its own; the one that begins changes with every "
    "turn. Ratios: times as good of each turn, rates when more and times when less; values are "
    f"medians of the turns' ratios, intervals those of the sign test at {CONFIDENCE:.0%}."
)
TurnNumbers = dict[str, dict[str, float]]  # case -> metric -> its number in one run


@dataclass(frozen=True)
class Ratio:
    """How many times as good one side is as the other, and between what it lies."""

    value: float
    low: float | None  # None: too few repetitions for an interval
    high: float | None

    def is_beyond(self, least: float) -> bool:
        """Whether the interval leaves 1 out, and the ratio is further from it than `least`.

        least: a share, the same upwards and downwards: of 0.02, above 1.02 or below 1 / 1.02.
        """
        if self.low is None or self.high is None or self.low <= 1.0 <= self.high:
            return False
        return abs(math.log(self.value)) > math.log1p(least)


def ratio_of_turns(ratios: Sequence[float]) -> Ratio:
    """The median of the turns' ratios, and between which two of them it lies by the sign test.

    That takes no shape of the noise for granted.
    """
    ratios = sorted(ratios)
    allowed = (1.0 - CONFIDENCE) / 2.0 * 2 ** len(ratios)
    rank, below = 0, 1  # ratios outside at either end, and orders with at most so many
    while below <= allowed:
        rank += 1
        below += math.comb(len(ratios), rank)
    value = statistics.median(ratios)
    return Ratio(value, ratios[rank - 1], ratios[-rank]) if rank else Ratio(value, None, None)


def more_is_better(metric: str) -> bool | None:
    """Of a metric; None for what is no speed."""
    return next((more for end, more in MORE_IS_BETTER.items() if metric.endswith(end)), None)


@dataclass(frozen=True)
class TurnCommand:
    """A command of predict.bench, which writes a file of numbers; folder: where it runs."""

    words: Sequence[str]
    folder: Path | None = None  # a checkout whose `predict` it takes; None: here
    env: Mapping[str, str] = field(default_factory=dict)

    def file(self) -> dict[str, Any]:
        """What it writes. Raises UserError where it fails."""
        env = {**os.environ, **self.env}
        if self.folder is not None:
            # Ahead of what the caller has there, which may be where Paddle is.
            paths = [str(self.folder), str(self.folder / "csrc"), env.get("PYTHONPATH", "")]
            env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        with tempfile.TemporaryDirectory(prefix="regatta-") as scratch:
            path = Path(scratch) / "numbers.json"
            run_program([*self.words, "--output_file", str(path)], self.folder, env)
            return read_json_object(path)


def run_program(
    words: Sequence[str], folder: Path | None, env: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    """What a program prints.

    Raises UserError where it fails: with its last lines, and the signal that ended it.
    """
    own = [sys.executable if words[0] == "python" else words[0], *words[1:]]
    try:
        done = subprocess.run(
            own, cwd=folder, env=env, capture_output=True, encoding="utf-8", check=False
        )
    except OSError as error:
        raise UserError(f"{words[0]} cannot be started: {error.strerror}", 1) from None
    if done.returncode != 0:
        code = done.returncode
        signals = {-each.value: f"signal {each.name}" for each in signal.Signals}
        said = "\n".join(done.stderr.strip().splitlines()[-LAST_LINES:])
        raise UserError(f"{shlex.join(words)} ended with {signals.get(code, code)}: {said}", 1)
    return done


def cases_of(content: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name, as "suite: case", and the row of every case of a file of numbers."""
    for name, held in content["suites"].items():
        for row in held["rows"]:
            yield f"{name}: {row['name']}", row


def numbers_of(content: Mapping[str, Any]) -> TurnNumbers:
    """The numbers of a file that are speeds; of a row without repetitions all of them."""
    return {
        case: {
            metric: float(row["values"][metric])
            for metric in row.get("spread", row["values"])
            if more_is_better(metric) is not None and (row["values"][metric] or 0.0) > 0.0
        }
        for case, row in cases_of(content)
    }


@dataclass
class Turns:
    """The numbers of two sides, turn by turn; names: of the sides, the one that is held against."""

    names: tuple[str, str]
    samples: dict[str, dict[str, tuple[list[float], list[float]]]] = field(default_factory=dict)

    def add(self, before: TurnNumbers, after: TurnNumbers) -> None:
        """Notes a turn. What one side lacks is left out."""
        for case in before.keys() & after.keys():
            held = self.samples.setdefault(case, {})
            for metric in before[case].keys() & after[case].keys():
                both = held.setdefault(metric, ([], []))
                both[0].append(before[case][metric])
                both[1].append(after[case][metric])

    def ratios(self) -> Iterator[tuple[str, str, list[float]]]:
        """Case, metric, and how many times as good the second side is, turn by turn."""
        for case in sorted(self.samples):
            for metric, (before, after) in sorted(self.samples[case].items()):
                better = (before, after) if more_is_better(metric) else (after, before)
                yield case, metric, [late / early for early, late in zip(*better, strict=True)]

    def suites(self, command: str) -> dict[str, Suite]:
        """Medians and spread of both sides, and of the ratios."""
        rows: dict[str, list[RecordRow]] = {name: [] for name in (*self.names, "ratios")}
        for case in sorted(self.samples):
            for number, name in enumerate(self.names):
                samples = {metric: both[number] for metric, both in self.samples[case].items()}
                rows[name].append(repeated_row(case, samples))
            ratios = {metric + RATIO: each for of, metric, each in self.ratios() if of == case}
            ends = {metric: ratio_of_turns(each) for metric, each in ratios.items()}
            intervals = {m: [r.low, r.high] for m, r in ends.items() if r.low is not None}
            rows["ratios"].append({**repeated_row(case, ratios), "intervals": intervals})
        return {name: suite(each, {}, command, METHOD) for name, each in rows.items()}


def take_turns(
    turns: Turns,
    before: Callable[[], TurnNumbers],
    after: Callable[[], TurnNumbers],
    num_turns: int,
    on_turn: Callable[[], None],
) -> None:
    """Measures both sides `num_turns` times into `turns`."""
    for turn in range(num_turns):
        if turn % 2:
            late, early = after(), before()
        else:
            early, late = before(), after()
        turns.add(early, late)
        on_turn()
