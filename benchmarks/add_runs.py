"""Adds runs of predict.bench.throughput to a dated file, as one of its suites.

    python benchmarks/add_runs.py benchmarks/h200/2026-11-26.json experts RUN.json RUN.json

A RUN is what --output_file wrote; its name without the ending names its rows. Runs of that name
that the suite has already are replaced, all others stay. The file is made where there is none.
benchmarks/README.md says what it holds; benchmarks/make_tables.py makes tables from it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Content = dict[str, Any]

SAME = ("device", "date", "versions")  # of all runs of a file
VALUES = (
    *("ttft_ms", "tpot_ms", "share_of_limit", "decode_bandwidth_share", "prefill_flops_share"),
    *("prompt_experts", "decode_experts", "measured_bandwidth_gbs", "measured_gflops_ceiling"),
)
SAMPLES = ("ttft_ms", "tpot_ms")
UNITS = {
    "ttft_ms": "ms to the first token",
    "tpot_ms": "ms per token",
    "prompt_experts": "distinct experts of a layer and step",
    "decode_experts": "distinct experts of a layer and step",
    "measured_bandwidth_gbs": "GB/s",
    "measured_gflops_ceiling": "GFLOP/s",
}
# The folders of a path from the root: they are those of one machine.
FOLDERS = re.compile(r"(?:^|(?<==))/(?:[^/]+/)*")


def shared_command(command: str) -> str:
    """The line without where it wrote to, and with no more than the names of absolute paths."""
    words = shlex.split(command)
    if "--output_file" in words:
        first = words.index("--output_file")
        del words[first : first + 2]
    return shlex.join(FOLDERS.sub("", word) for word in words)


def short(value: float) -> float:
    """Four digits behind the point: the tables round to two, and no half of what was rounded."""
    return round(value, 4)


def run_rows(run: str, content: Content) -> list[Content]:
    """The rows of a run, as a suite has them."""
    rows = []
    for row in content["suites"]["throughput"]["rows"]:
        found = {name: row["values"].get(name) for name in VALUES}
        made = {
            "name": f"{run}, {row['name']}",
            "run": run,
            "case": row["name"],
            "values": {name: short(value) for name, value in found.items() if value is not None},
            "samples": {
                name: [short(sample) for sample in samples]
                for name, samples in row["samples"].items()
                if name in SAMPLES
            },
        }
        if "limit" in row:
            made["limit"] = row["limit"]
        rows.append(made)
    return rows


def run_entry(content: Content) -> Content:
    """How a run was made, and what its process took."""
    suites = content["suites"]
    process = {row["name"]: row["values"]["value"] for row in suites["process"]["rows"]}
    return {
        "command": shared_command(suites["throughput"]["command"]),
        "settings": {name: each for name, each in content["settings"].items() if each is not None},
        "ready_s": short(process["process start to ready"]),
        "peak_memory_bytes": process["peak memory"],
    }


def with_runs(file: Content, suite: str, runs: Mapping[str, Content]) -> Content:
    """The file with its suite's runs of these names replaced by these.

    Raises ValueError for a run of another device, day or build than the file's.
    """
    made = dict(file)
    suites = dict(made.pop("suites", {}))
    held = dict(suites.get(suite, {"runs": {}, "rows": []}))
    for run, content in runs.items():
        for name in SAME:
            if made.setdefault(name, content[name]) != content[name]:
                raise ValueError(
                    f"{name} of {run} is {content[name]}, and the file's is {made[name]}; "
                    "add it to a file of its own"
                )
        spoken = content["suites"]["throughput"]
        held |= {"method": spoken["method"], "spread": spoken["spread"], "units": UNITS}
        held["runs"] = {**held["runs"], run: run_entry(content)}
        rows = [row for row in held["rows"] if row["run"] != run]
        held["rows"] = [*rows, *run_rows(run, content)]
    order = ("method", "spread", "units", "runs", "rows")
    suites[suite] = {name: held[name] for name in order}
    return {**made, "suites": suites}


def add(path: Path, suite: str, files: Sequence[Path]) -> None:
    """Writes `path` with the runs. Raises ValueError where they do not belong there."""
    file: Content = {"date": path.stem[:10]}  # a file's name begins with its day
    if path.exists():
        file = json.loads(path.read_text(encoding="utf-8"))
    runs = {each.stem: json.loads(each.read_text(encoding="utf-8")) for each in files}
    if len(runs) < len(files):
        raise ValueError("two runs have one name, which names their rows; rename a file")
    made = with_runs(file, suite, runs)
    made = {name: made.pop(name) for name in SAME} | made  # in the order of the other files
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="benchmarks/DEVICE/DATE.json, made or added to")
    parser.add_argument("suite", help="the suite of the file that the runs go to")
    parser.add_argument("runs", type=Path, nargs="+", help="what --output_file wrote")
    arguments = parser.parse_args(argv)
    try:
        add(arguments.file, arguments.suite, arguments.runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    except (KeyError, TypeError) as error:
        parser.error(
            f"a run is not what predict.bench.throughput writes ({type(error).__name__}: {error}); "
            "give what its --output_file wrote"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
