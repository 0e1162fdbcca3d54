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
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LAST_LINES = 8  # of what a side that failed has said
KINDS: dict[str, dict[str, Any]] = {
    "none": {},
    "weight_only_int8": {"quant_type": "weight_only_int8"},
    "weight_only_int4": {"quant_type": "weight_only_int4", "weightonly_group_size": 64},
}
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


class Side:
    """A process that answers a JSON object a line with one."""

    def __init__(self, checkout: Path, settings: Mapping[str, Any], adapters: Sequence[str]):
        paths = os.pathsep.join(str(checkout / folder) for folder in (".", "csrc"))
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `end`
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--side"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.ask({"settings": dict(settings), "adapters": list(adapters)})

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer; ends the program when there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            said = self._said.read().decode("utf-8", "replace").strip().splitlines()
            sys.exit("\n".join(["a side ended:", *said[-LAST_LINES:]]))
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._said.close()


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


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", action="store_true", help="be one of the two processes")
    parser.add_argument("--before", type=Path, help="another checkout, built")
    parser.add_argument("--before_commit", help="its commit, where it is no git checkout")
    parser.add_argument("--adapters", type=Path, help="a folder of predict.bench.random_adapters")
    parser.add_argument("--model", default="examples/shapes/qwen2.5-0.5b")
    parser.add_argument("--quant_types", default="none,weight_only_int8,weight_only_int4")
    parser.add_argument("--cases", default="1x16x33,8x16x33,1x128x1")
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--output_file", type=Path)
    flags = parser.parse_args()
    if flags.side:
        serve()
        return 0
    if (flags.before is None) == (flags.adapters is None):
        parser.error("one of --before and --adapters is needed")
    from predict.bench.cases import parse_cases
    from predict.bench.record import cpu_device, own_versions, record, suite

    cases = [
        (case.num_requests, case.input_len, case.output_len)
        for case in parse_cases(flags.cases.split(","))
    ]
    names = sorted(path.name for path in flags.adapters.iterdir()) if flags.adapters else []
    sides = ((flags.before or ROOT).resolve(), ()), (ROOT, names)
    rows = []
    for kind in flags.quant_types.split(","):
        settings = {
            "model_name_or_path": str(ROOT / flags.model),
            "load_format": "dummy",
            "dtype": "bfloat16",
            "inference_model": True,
            "attention": "append",
            "batch_size": max(count for count, _, _ in cases),
            "max_length": max(length + tokens for _, length, tokens in cases),
            **KINDS[kind],
        }
        if names:
            settings["lora_modules"] = [f"{name}={flags.adapters / name}" for name in names]
        pair = [Side(checkout, settings, adapters) for checkout, adapters in sides]
        for case in cases:
            found: list[list[dict[str, Any]]] = [[], []]
            for turn in range(-1, flags.turns):  # the first is not counted
                for side in (0, 1) if turn % 2 else (1, 0):
                    answer = pair[side].ask({"case": case})
                    found[side] += [answer] if turn >= 0 else []
            before, after = ([each["ms"] for each in side] for side in found)
            same = len({each["ids"] for side in found for each in side}) == 1
            name = f"{Path(flags.model).name}, {kind}, {'x'.join(map(str, case))}"
            rows.append(row_of(name, before, after, same))
            values = {**rows[-1]["values"], "interval": rows[-1]["interval"]}
            print(name, values, "same tokens" if same else "other tokens", flush=True)
        for each in pair:
            each.end()
    if flags.output_file:
        name = "adapters" if names else "builds"
        command = shlex.join(["python", "benchmarks/turns.py", *sys.argv[1:]])
        command = re.sub(r"(?<=\s)/\S*/", "", command)  # folders are those of one machine
        builds = [flags.before_commit or commit_of(sides[0][0]), commit_of(ROOT)]
        shown = {"before": builds[0], "after": builds[1], "adapters": len(names)}
        made = record(cpu_device(), own_versions(), shown, {name: suite(rows, {}, command, METHOD)})
        flags.output_file.write_text(json.dumps(made, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
