"""Two builds, or a model without and with its adapters, timed in turns on a CPU.

    python benchmarks/turns.py --before ../older --output_file benchmarks/DEVICE/DATE-builds.json
    python benchmarks/turns.py --adapters FOLDER --output_file benchmarks/DEVICE/DATE-adapters.json

Each side is a process that keeps its model, and the side that begins changes with every turn. What
other work does to the machine then meets both alike. Greedy tokens are compared besides.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
METHOD = (
    "Two processes with random weights in turns, the side that begins changes with each. Decoding: "
    "median over requests of the time per output token; prompts: of the time to the first token. "
    "Ratio: median of the turns' after / before, its interval that of the sign test at 95 %"
)


def serve() -> None:
    """One side: loads what the first line says, then times what each further line says.

    It uses what every version of `predict` has, and takes it from where PYTHONPATH points.
    """
    import numpy as np

    from predict import LLM, EngineConfig, SamplingParams

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print
    first = json.loads(sys.stdin.readline())
    adapters = first["adapters"]
    llm = LLM(EngineConfig(**first["settings"]))
    print(json.dumps({}), file=out, flush=True)
    for line in sys.stdin:
        count, length, tokens = json.loads(line)["case"]
        prompts = np.random.default_rng(0).integers(3, 1_000, (count, length)).tolist()
        params = [
            SamplingParams(
                temperature=0.0,
                max_new_tokens=tokens,
                ignore_eos=True,
                **({"adapter": adapters[i % len(adapters)]} if adapters else {}),
            )
            for i in range(count)
        ]
        metrics, ids = [], 0
        for each in llm.generate(prompts, params):
            metrics.append(each.metrics)
            ids = zlib.crc32(json.dumps(list(each.token_ids)).encode(), ids)
        name = "time_per_output_token" if tokens > 1 else "time_to_first_token"
        seconds = statistics.median(getattr(each, name) for each in metrics)
        print(json.dumps({"ms": 1e3 * seconds, "ids": ids}), file=out, flush=True)


def row_of(name: str, before: Sequence[float], after: Sequence[float], same: bool) -> Any:
    """What a case's turns came to."""
    from predict.bench.spread import ratio_of_turns

    ratio = ratio_of_turns(before, after, 0.95)
    return {
        "name": name,
        "values": {
            "before_ms": round(statistics.median(before), 3),
            "after_ms": round(statistics.median(after), 3),
            "ratio": round(ratio.value, 4),
        },
        "interval": [ratio.low and round(ratio.low, 4), ratio.high and round(ratio.high, 4)],
        "same_tokens": same,
        "samples": {
            "before_ms": [round(each, 3) for each in before],
            "after_ms": [round(each, 3) for each in after],
        },
    }


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, or its folder's name where it is none."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    in_git = found.returncode == 0 and (checkout / ".git").exists()
    return found.stdout.strip() if in_git else checkout.name


def measured(flags: argparse.Namespace) -> dict[str, Any]:
    """The record of all cases. Raises UserError for what cannot be run, and where a side fails."""
    from predict.bench.cases import parse_cases
    from predict.bench.cpu_peer.kinds import Kind
    from predict.bench.cpu_peer.sides import Program, started
    from predict.bench.record import cpu_device, own_versions, record, suite

    cases = parse_cases(flags.cases.split(","))
    names = sorted(path.name for path in flags.adapters.iterdir()) if flags.adapters else []
    checkouts = (flags.before or ROOT).resolve(), ROOT
    words = (str(Path(__file__).resolve()), "--side")
    programs = [
        Program(f"the side {which}", words, folder, {"PYTHONPATH": f"{folder}:{folder / 'csrc'}"})
        for which, folder in zip(("before", "after"), checkouts, strict=True)
    ]
    shared = {
        "model_name_or_path": str(ROOT / flags.model),
        "load_format": "dummy",
        "inference_model": True,
        "attention": "append",
        "batch_size": max(case.num_requests for case in cases),
        "max_length": max(case.input_len + case.output_len for case in cases),
    }
    if names:
        shared["lora_modules"] = [f"{name}={(flags.adapters / name).resolve()}" for name in names]
    rows = []
    for kind in flags.quant_types.split(","):
        settings = shared | Kind.parse(kind, "bfloat16", None).settings
        with started(*programs, num_threads=len(os.sched_getaffinity(0))) as pair:
            for side, adapters in zip(pair, ((), names), strict=True):
                side.ask({"settings": settings, "adapters": adapters})
            for case in cases:
                question = {"case": [case.num_requests, case.input_len, case.output_len]}
                for side in pair:
                    side.ask(question)  # to warm up
                answers: list[list[dict[str, Any]]] = [[], []]
                for turn in range(flags.turns):
                    for index in (0, 1) if turn % 2 else (1, 0):
                        answers[index].append(pair[index].ask(question))
                before, after = ([each["ms"] for each in side] for side in answers)
                same = len({each["ids"] for side in answers for each in side}) == 1
                row = row_of(f"{Path(flags.model).name}, {kind}, {case}", before, after, same)
                rows.append(row)
                print(row["name"], row["values"], row["interval"], f"same tokens: {same}")
    name = "adapters" if names else "builds"
    command = shlex.join(["python", "benchmarks/turns.py", *sys.argv[1:]])
    command = re.sub(r"(?<=\s)/\S*/", "", command)  # folders are those of one machine
    builds = [flags.before_commit or commit_of(checkouts[0]), commit_of(ROOT)]
    shown = {"before": builds[0], "after": builds[1], "adapters": len(names)}
    return record(cpu_device(), own_versions(), shown, {name: suite(rows, {}, command, METHOD)})


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", action="store_true", help="be one of the two processes")
    parser.add_argument("--before", type=Path, help="another checkout, built")
    parser.add_argument("--before_commit", help="its commit, where it is no git checkout")
    parser.add_argument("--adapters", type=Path, help="a folder of predict.bench.random_adapters")
    parser.add_argument("--model", default="examples/shapes/qwen2.5-0.5b")
    parser.add_argument("--quant_types", default="none,weight_only_int8,weight_only_int4_g64")
    parser.add_argument("--cases", default="1x16x33,8x16x33,1x128x1")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--output_file", type=Path)
    flags = parser.parse_args()
    if flags.side:
        serve()
        return 0
    if (flags.before is None) == (flags.adapters is None):
        parser.error("one of --before and --adapters is needed")
    from predict.cli.command import run_command

    def action(_: object) -> int:
        made = measured(flags)
        if flags.output_file:
            flags.output_file.write_text(json.dumps(made, indent=2) + "\n")
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
