"""What became faster or slower between two files of numbers, beyond the spread of repetitions.

Takes the files that --output_file of predict.bench.throughput, serving and cpu_peer writes. Every
number of a case that stands in both files is compared: the ratio is the median of all pairs of
repetitions, its interval that of the rank test of Mann and Whitney, which takes no shape of the
noise for granted.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from predict.bench.report import write_json
from predict.bench.spread import MOST_SAMPLES, Ratio, least_repetitions, ratio_between
from predict.cli.command import run_command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.errors import EXIT_FAILURE, UserError
from predict.system.console import say, show
from predict.system.files import read_json_object
from predict.system.outputs import check_output
from predict.system.signals import Signals

PROG = "python -m predict.bench.compare"
USAGE = "BEFORE.json AFTER.json [--flag [VALUE] ...]"
GROUP = "Comparison"
FAILS = ("slower", "different")
# fmt: off
FLAGS = (
    Flag(GROUP, "confidence", "float", 0.95,
         "How sure a difference must be. Of as many numbers that did not change, the rest to 1 is "
         "called changed by chance."),
    Flag(GROUP, "min_change", "float", 0.02,
         "Changes of at most this share are called the same, however sure they are."),
    Flag(GROUP, "other_device", "bool", False,
         "Compare files of different devices, too."),
    Flag(GROUP, "fail_on", "str", None,
         "End with exit status 1 where a number is slower, or is different either way; for CI.",
         choices=FAILS),
    Flag(GROUP, "output_file", "str", None,
         "Write the comparison as JSON."),
)
# fmt: on
# What two files must have in common, where both say it.
IDENTITY = ("name", "family", "model", "num_threads", "features", "architecture", "client")
FASTER, SLOWER, SAME, TOO_FEW = "faster", "slower", "same", "too few"
# End of a metric's name -> whether more of it is better. Others are no speeds: not compared.
MORE_IS_BETTER = {"_per_s": True, "_share": True, "times_as_good": True, "_ms": False, "_s": False}


@dataclass(frozen=True)
class Recorded:
    """What a file holds: where it was measured and how, and the repetitions of every number."""

    path: str
    device: Mapping[str, Any]
    versions: Mapping[str, Any]
    settings: Mapping[str, Any]
    # "suite: case" -> metric -> repetitions
    cases: Mapping[str, Mapping[str, tuple[float, ...]]]


@dataclass(frozen=True)
class Change:
    """One number of one case in both files."""

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
    try:
        cases: dict[str, dict[str, tuple[float, ...]]] = {}
        for suite, held in content["suites"].items():
            for row in held["rows"]:
                case = f"{suite}: {row['name']}"
                if case in cases:
                    raise UserError(f"{path} has {case!r} twice; leave one of them out")
                cases[case] = {
                    metric: _repetitions(metric, samples)
                    for metric, samples in row.get("samples", {}).items()
                }
        device, versions, settings = (
            dict(content.get(name, {})) for name in ("device", "versions", "settings")
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} is no file of a benchmark's numbers ({type(error).__name__}: {error}); give "
            "two that --output_file wrote"
        ) from None
    return Recorded(str(path), device, versions, settings, cases)


def _repetitions(metric: str, samples: Any) -> tuple[float, ...]:
    if not isinstance(samples, list) or not 0 < len(samples) <= MOST_SAMPLES:
        raise ValueError(f"{metric} has no list of 1 to {MOST_SAMPLES} samples")
    if not all(type(sample) in (int, float) for sample in samples):
        raise ValueError(f"{metric} has samples that are no numbers")
    return tuple(float(sample) for sample in samples)


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


def compare(
    before: Recorded, after: Recorded, confidence: float, min_change: float
) -> list[Change]:
    """Every number that both files have repetitions of. Raises UserError where there is none."""
    changes = []
    for case, metrics in before.cases.items():
        for metric, early in metrics.items():
            late = after.cases.get(case, {}).get(metric)
            more = next((m for end, m in MORE_IS_BETTER.items() if metric.endswith(end)), None)
            # A share or a rate of nothing has no ratio.
            if late is not None and more is not None and min(*early, *late) > 0.0:
                ratio = ratio_between(*((early, late) if more else (late, early)), confidence)
                change = Change(
                    case=case,
                    metric=metric,
                    before=statistics.median(early),
                    after=statistics.median(late),
                    num_before=len(early),
                    num_after=len(late),
                    times_as_fast=ratio,
                    verdict=_verdict(ratio, min_change),
                )
                changes.append(change)
    if not changes:
        raise UserError(
            f"{before.path} and {after.path} have no case in common with repetitions of a number; "
            f"the first has {', '.join(before.cases) or 'none'}, the second "
            f"{', '.join(after.cases) or 'none'}"
        )
    return changes


def _verdict(ratio: Ratio, min_change: float) -> str:
    if ratio.low is None:
        return TOO_FEW
    if not ratio.is_beyond(min_change):
        return SAME
    return FASTER if ratio.value > 1.0 else SLOWER


def table(changes: Sequence[Change], confidence: float) -> str:
    """A line per number, after a line of heads."""
    width = max(len("case"), *(len(change.case) for change in changes))
    metrics = max(len("number"), *(len(change.metric) for change in changes))
    between = f"{100 * confidence:g}% interval"
    lines = [
        f"{'case':<{width}}  {'number':<{metrics}}{'before':>12}{'after':>12}"
        f"{'times as fast':>15}{between:>18}  verdict"
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


def summary(changes: Sequence[Change], confidence: float) -> str:
    """How many of each verdict, and what to do about too few repetitions."""
    counts = [
        f"{number} {verdict}"
        for verdict in (FASTER, SLOWER, SAME)
        if (number := sum(change.verdict == verdict for change in changes))
    ]
    same = [change.times_as_fast for change in changes if change.verdict == SAME]
    if same:
        low, high = (
            min(ratio.low or 0.0 for ratio in same),
            max(ratio.high or 0.0 for ratio in same),
        )
        counts[-1] += f" as far as the spread shows (intervals within {low:.3f} to {high:.3f})"
    few = [change for change in changes if change.verdict == TOO_FEW]
    if few:
        counts.append(
            f"{len(few)} with too few repetitions to say; {100 * confidence:g}% takes "
            f"{least_repetitions(confidence)} on either side, where {few[0].case} has "
            f"{few[0].num_before} and {few[0].num_after}"
        )
    return ", ".join(counts)


def parse(argv: Sequence[str]) -> tuple[FlagValues, tuple[str, str]]:
    """The flags and the two files of a command line. Raises UserError."""
    num_files = next((i for i, word in enumerate(argv) if word.startswith("-")), len(argv))
    files, words = argv[:num_files], argv[num_files:]
    flags = parse_flags(words, FLAGS, PROG, __doc__ or "", USAGE)
    if len(files) != 2:
        raise UserError(f"{len(files)} files where two are compared; write {PROG} {USAGE}")
    if not 0.5 <= flags["confidence"] <= 0.9999:
        raise UserError(
            f"--confidence {flags['confidence']} is not supported (allowed: 0.5 to 0.9999)"
        )
    if not 0.0 <= flags["min_change"] <= 10.0:
        raise UserError(f"--min_change {flags['min_change']} is not supported (allowed: 0 to 10)")
    if flags["output_file"] is not None:
        check_output("output_file", flags["output_file"], files=dict(zip("ab", files, strict=True)))
    return flags, (files[0], files[1])


def is_failure(changes: Sequence[Change], fail_on: str | None) -> bool:
    """Whether --fail_on asks for exit status 1. Too few repetitions do: they show nothing."""
    bad = {None: (), "slower": (SLOWER, TOO_FEW), "different": (SLOWER, FASTER, TOO_FEW)}[fail_on]
    return any(change.verdict in bad for change in changes)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(signals: Signals) -> int:
        flags, paths = parse(sys.argv[1:] if argv is None else argv)
        before, after = (read_recorded(path) for path in paths)
        difference = different_device(before, after)
        if difference is not None and not flags["other_device"]:
            raise UserError(
                f"the files are of different devices: {difference}; with --other_device they are "
                "compared all the same"
            )
        confidence = flags["confidence"]
        changes = compare(before, after, confidence, flags["min_change"])
        lines = notes(before, after)
        for line in ([f"devices differ: {difference}"] if difference else []) + lines:
            say(f"note: {line}")
        show(table(changes, confidence))
        show("\n" + summary(changes, confidence))
        if flags["output_file"] is not None:
            settings = {"confidence": confidence, "min_change": flags["min_change"]}
            made = {"before": before.path, "after": after.path, **settings, "notes": lines}
            write_json(
                {**made, "changes": [asdict(change) for change in changes]}, flags["output_file"]
            )
        return EXIT_FAILURE if is_failure(changes, flags["fail_on"]) else 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
