"""What became faster or slower: two files of numbers, or two commands that take turns.

Files are those that --output_file of predict.bench.throughput and serving writes, and the commands
are those that write them. Every number of a case that stands in both is compared. Commands in turns
say most: each turn has a ratio, and the interval is that of the sign test. Of two files the
interval follows from medians, quartiles and how many repetitions there were.
"""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from predict.bench.outputs import Outputs
from predict.bench.record import command_line, record
from predict.bench.turns import (
    LEAST_TURNS,
    Ratio,
    TurnCommand,
    TurnNumbers,
    Turns,
    cases_of,
    more_is_better,
    numbers_of,
    ratio_of_turns,
    take_turns,
)
from predict.cli.command import command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.errors import EXIT_FAILURE, UserError
from predict.system.console import say, show
from predict.system.files import read_json_object
from predict.system.progress import Progress
from predict.system.ranges import Range
from predict.system.signals import Signals

PROG = "python -m predict.bench.compare"
USAGE = "BEFORE.json AFTER.json | --before COMMAND [--after COMMAND] [--flag [VALUE] ...]"
GROUP = "Comparison"
# fmt: off
FLAGS = (
    Flag(GROUP, "before", "str", None,
         "In place of two files: a command of predict.bench, which takes turns with --after's."),
    Flag(GROUP, "after", "str", None,
         "The other command; when not given, the same."),
    Flag(GROUP, "before_folder", "str", None,
         "Run --before in this checkout, which is built: two builds beside each other."),
    Flag(GROUP, "turns", "int", 20, "Turns of both commands.", allowed=Range(1, 1000)),
    Flag(GROUP, "min_change", "float", 0.02,
         "Changes of at most this share are called the same, however sure they are.",
         allowed=Range(0.0, 10.0, whole=False)),
    Flag(GROUP, "other_device", "bool", False,
         "Compare files of different devices, too."),
    Flag(GROUP, "fail_on", "str", None,
         "End with exit status 1 where a number is slower, or is different either way; for CI.",
         choices=("slower", "different")),
    Flag(GROUP, "output_file", "str", None,
         "Write the comparison as JSON."),
)
# fmt: on
# What two files must have in common, where both say it.
IDENTITY = ("name", "family", "model", "num_threads", "features", "architecture", "client")
FASTER, SLOWER, SAME, TOO_FEW = "faster", "slower", "same", "too few"
LEAST_REPETITIONS = 4  # on either side of two files


class Number(NamedTuple):
    """A number of a file: the median of so many repetitions, and their quartiles."""

    median: float
    n: int
    q1: float
    q3: float


@dataclass(frozen=True)
class Recorded:
    """What a file holds: where it was measured and how, and the numbers of every case."""

    path: str
    device: Mapping[str, Any]
    versions: Mapping[str, Any]
    settings: Mapping[str, Any]
    cases: Mapping[str, Mapping[str, Number]]  # "suite: case" -> metric


@dataclass(frozen=True)
class Change:
    """One number of one case on both sides."""

    case: str
    metric: str
    before: float  # medians
    after: float
    num_before: int  # repetitions
    num_after: int
    times_as_fast: Ratio  # above 1: after is better
    verdict: str


def read_recorded(path: str | Path) -> Recorded:
    """The numbers of a file. Raises UserError for one that is not of this format."""
    content = read_json_object(Path(path))
    cases: dict[str, dict[str, Number]] = {}
    try:
        for case, row in cases_of(content):
            if case in cases:
                raise UserError(f"{path} has {case!r} twice; leave one of them out")
            cases[case] = {
                metric: Number(row["values"][metric], spread["n"], spread["q1"], spread["q3"])
                for metric, spread in row.get("spread", {}).items()
                if row["values"][metric] is not None
            }
            if not all(isinstance(n, (int, float)) for each in cases[case].values() for n in each):
                raise ValueError("a spread with what is no number")
        device, versions, settings = (
            dict(content.get(name, {})) for name in ("device", "versions", "settings")
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is no file of a benchmark's numbers ({type(error).__name__}: {error}); give "
            "two that --output_file wrote"
        ) from None
    return Recorded(str(path), device, versions, settings, cases)


def ratio_of_files(before: Number, after: Number) -> Ratio:
    """Of `after` to `before`, by the notches of McGill, Tukey and Larsen (1978).

    The median of n repetitions with quartiles q1 and q3 is sure to some 0.93 (q3 - q1) / sqrt(n).
    Quartiles of a few repetitions lie too close, for which the interval is 1 + 3 / n times as wide:
    then it misses the ratio of two normal or exponential distributions at most as often as it says.
    """
    value, fewest = after.median / before.median, min(before.n, after.n)
    if fewest < LEAST_REPETITIONS:
        return Ratio(value, None, None)
    spread = math.hypot(
        *((each.q3 - each.q1) / each.median / math.sqrt(each.n) for each in (before, after))
    )
    width = math.exp(1.96 * 0.93 * (1.0 + 3.0 / fewest) * spread)
    return Ratio(value, value / width, value * width)


def different_device(before: Recorded, after: Recorded) -> str | None:
    """How the devices differ, in words; None where they do not, as far as the files say."""
    for name in IDENTITY:
        found = [recorded.device.get(name) for recorded in (before, after)]
        if name == "name" and None in found:
            return "a file does not say what it was measured on"
        if None not in found and found[0] != found[1]:
            return f"{name} is {found[0]} in {before.path} and {found[1]} in {after.path}"
    return None


def notes(before: Recorded, after: Recorded) -> list[str]:
    """What else is not the same in both files, a line each."""
    lines = []
    for kind in ("settings", "versions"):
        early, late = (getattr(recorded, kind) for recorded in (before, after))
        for name in dict.fromkeys((*early, *late)):
            if early.get(name) != late.get(name):
                lines.append(f"{name}: {early.get(name)} before, {late.get(name)} after")
    for here, there in ((before, after), (after, before)):
        alone = [case for case in here.cases if case not in there.cases]
        if alone:
            lines.append(f"only in {here.path}: {', '.join(alone)}")
    return lines


def compare_files(before: Recorded, after: Recorded, min_change: float) -> list[Change]:
    """Every number that both files have repetitions of. Raises UserError where there is none."""
    changes = []
    for case, metrics in before.cases.items():
        for metric, early in metrics.items():
            late, more = after.cases.get(case, {}).get(metric), more_is_better(metric)
            # A share or a rate of nothing has no ratio.
            if late is not None and more is not None and min(early.median, late.median) > 0.0:
                ratio = ratio_of_files(*((early, late) if more else (late, early)))
                verdict = _verdict(ratio, min_change)
                medians, counts = (early.median, late.median), (early.n, late.n)
                changes.append(Change(case, metric, *medians, *counts, ratio, verdict))
    if not changes:
        raise UserError(
            f"{before.path} and {after.path} have no case in common with repetitions of a number; "
            f"the first has {', '.join(before.cases) or 'none'}, the second "
            f"{', '.join(after.cases) or 'none'}"
        )
    return changes


def changes_of(turns: Turns, min_change: float) -> list[Change]:
    """Every number that both sides have in all turns."""
    changes = []
    for case, metric, ratios in turns.ratios():
        before, after = turns.samples[case][metric]
        medians = statistics.median(before), statistics.median(after)
        ratio, count = ratio_of_turns(ratios), len(ratios)
        verdict = _verdict(ratio, min_change)
        changes.append(Change(case, metric, *medians, count, count, ratio, verdict))
    return changes


def _verdict(ratio: Ratio, min_change: float) -> str:
    if ratio.low is None:
        return TOO_FEW
    if not ratio.is_beyond(min_change):
        return SAME
    return FASTER if ratio.value > 1.0 else SLOWER


def table(changes: Sequence[Change], names: tuple[str, str] = ("before", "after")) -> str:
    """A line per number, after a line of heads."""
    width = max(len("case"), *(len(change.case) for change in changes))
    metrics = max(len("number"), *(len(change.metric) for change in changes))
    lines = [
        f"{'case':<{width}}  {'number':<{metrics}}{names[0]:>12}{names[1]:>12}"
        f"{'times as fast':>15}{'95% interval':>18}  verdict"
    ]
    for change in changes:
        ratio = change.times_as_fast
        interval = "-" if ratio.low is None else f"{ratio.low:.3f} to {ratio.high:.3f}"
        lines.append(
            f"{change.case:<{width}}  {change.metric:<{metrics}}{_short(change.before):>12}"
            f"{_short(change.after):>12}{ratio.value:>15.3f}{interval:>18}  {change.verdict}"
        )
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"


def summary(changes: Sequence[Change]) -> str:
    """How many of each verdict, and what to do about too few repetitions."""
    found = Counter(change.verdict for change in changes)
    counts = [f"{found[each]} {each}" for each in (FASTER, SLOWER, SAME) if found[each]]
    few = [change for change in changes if change.verdict == TOO_FEW]
    if few:
        counts.append(
            f"{len(few)} with too few repetitions to say: an interval takes {LEAST_REPETITIONS} on "
            f"either side, or {LEAST_TURNS} turns, and {few[0].case} has {few[0].num_before} and "
            f"{few[0].num_after}"
        )
    return ", ".join(counts)


def parse(argv: Sequence[str]) -> tuple[FlagValues, Sequence[str]]:
    """The flags and the files of a command line: two, or none. Raises UserError."""
    num_files = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    files, words = argv[:num_files], argv[num_files:]
    flags = parse_flags(words, FLAGS, PROG, __doc__ or "", USAGE)
    if len(files) != (2 if flags["before"] is None else 0):
        raise UserError(
            f"{len(files)} files: two are compared, or none with --before; write {PROG} {USAGE}"
        )
    for name in ("after", "before_folder"):
        if flags["before"] is None and flags[name] is not None:
            raise UserError(f"--{name} goes with --before; give that too, or leave it out")
    if flags["after"] is None and flags["before_folder"] is None and flags["before"] is not None:
        raise UserError("--before alone is held against nothing; give --after or --before_folder")
    folder = flags["before_folder"]
    if folder is not None and not (Path(folder) / "predict").is_dir():
        raise UserError(f"--before_folder {folder} is no checkout: it has no folder predict")
    Outputs(flags["output_file"]).check(files=dict(zip("ab", files, strict=False)))
    return flags, files


def is_failure(changes: Sequence[Change], fail_on: str | None) -> bool:
    """Whether --fail_on asks for exit status 1. Too few repetitions do: they show nothing."""
    bad = {None: (), "slower": (SLOWER, TOO_FEW), "different": (SLOWER, FASTER, TOO_FEW)}[fail_on]
    return any(change.verdict in bad for change in changes)


def of_files(flags: FlagValues, files: Sequence[str]) -> tuple[list[Change], dict[str, Any]]:
    """The changes between two files, and what is written of them."""
    before, after = (read_recorded(path) for path in files)
    difference = different_device(before, after)
    if difference is not None and not flags["other_device"]:
        raise UserError(
            f"the files are of different devices: {difference}; with --other_device they are "
            "compared all the same"
        )
    changes = compare_files(before, after, flags["min_change"])
    lines = ([f"devices differ: {difference}"] if difference else []) + notes(before, after)
    for line in lines:
        say(f"note: {line}")
    made = {"before": before.path, "after": after.path, "min_change": flags["min_change"]}
    return changes, {**made, "notes": lines, "changes": [asdict(change) for change in changes]}


def of_commands(flags: FlagValues, command: str) -> tuple[list[Change], dict[str, Any]]:
    """The changes between two commands that take turns, and what is written of them."""
    folder = flags["before_folder"]
    words = [shlex.split(flags[name] or flags["before"]) for name in ("before", "after")]
    sides = (
        TurnCommand(words[0], None if folder is None else Path(folder).resolve()),
        TurnCommand(words[1]),
    )
    last: list[dict[str, Any]] = [{}, {}]
    differing: dict[str, None] = {}
    turns = Turns(("before", "after"))
    with Progress(flags["turns"], unit="turn", label="measuring") as progress:

        def measure(number: int) -> TurnNumbers:
            last[number] = sides[number].file()
            return numbers_of(last[number])

        def on_turn() -> None:
            before, after = map(tokens_of, last)
            differing.update({case: None for case in before if before[case] != after.get(case)})
            progress.on_finished()

        take_turns(turns, partial(measure, 0), partial(measure, 1), flags["turns"], on_turn)
    if not turns.samples:
        raise UserError("the two commands have no case in common; give both the same --cases")
    same = [case for case in tokens_of(last[0]) if case not in differing]
    if same or differing:
        say(
            f"note: the same tokens in {', '.join(same) or 'no case'}; "
            f"others in {', '.join(differing) or 'none'}"
        )
    settings = {"before": flags["before"], "after": flags["after"], "turns": flags["turns"]}
    made = record(last[1]["device"], last[1]["versions"], settings, turns.suites(command))
    return changes_of(turns, flags["min_change"]), {**made, "other_tokens": list(differing)}


def tokens_of(content: Mapping[str, Any]) -> dict[str, int]:
    """Of the cases of predict.bench.throughput, which tokens they had."""
    rows = content["suites"].get("throughput", {"rows": ()})["rows"]
    return {row["name"]: row["tokens_crc32"] for row in rows if "tokens_crc32" in row}


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code."""
    flags, files = parse(words)
    changes, made = (
        of_files(flags, files) if files else of_commands(flags, command_line(PROG, words))
    )
    show(table(changes))
    show("\n" + summary(changes))
    Outputs(flags["output_file"]).write(made)
    return EXIT_FAILURE if is_failure(changes, flags["fail_on"]) else 0


if __name__ == "__main__":
    sys.exit(main())
