"""LoRA adapters of random weights, for a run that has requests of several.

`python -m predict.bench.random_adapters --help`. Each is a folder in PEFT's form, in fp16, with
factors for every linear that a request's adapter may change.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

import numpy as np
from safetensors.numpy import save_file

from predict.adapters.weights import adapted_plans
from predict.cli.command import run_command
from predict.cli.flags import Flag, parse_flags
from predict.errors import UserError
from predict.loading.model import plan_of, read_spec
from predict.nn.weights import WeightPlan
from predict.system.console import show
from predict.system.signals import Signals

PROG = "python -m predict.bench.random_adapters"
GROUP = "Random adapters"
# fmt: off
FLAGS = (
    Flag(GROUP, "model_name_or_path", "str", None, "The base model's folder, or a shape alone."),
    Flag(GROUP, "output_dir", "str", None, "Where the adapters' folders are made: 0, 1, ..."),
    Flag(GROUP, "num_adapters", "int", 8, "Adapters to make."),
    Flag(GROUP, "rank", "int", 16, "Rank of every factor."),
    Flag(GROUP, "seed", "int", 0, "Same seed, same values."),
)
# fmt: on
USAGE = "--model_name_or_path DIR --output_dir DIR [--flag [VALUE] ...]"


def write_adapter(plan: WeightPlan, directory: Path, rank: int, seed: int) -> None:
    """Writes one adapter of this network.

    Its factors make about a third of what the base's linears make, were those of unit gain.
    """
    generator = np.random.default_rng(seed)
    tensors, targets = {}, set()
    for _, _, linear in adapted_plans(plan):
        for prefix, size in zip(linear.prefixes, linear.part_sizes, strict=True):
            width = linear.in_features
            a = generator.standard_normal((rank, width), np.float32) / np.sqrt(width)
            b = generator.standard_normal((size, rank), np.float32) * 0.15 / np.sqrt(rank)
            name = f"base_model.model.{prefix}"
            tensors[f"{name}.lora_A.weight"] = a.astype(np.float16)
            tensors[f"{name}.lora_B.weight"] = b.astype(np.float16)
            targets.add(prefix.rpartition(".")[2])
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(targets),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config) + "\n")


def write_adapters(model: str, output_dir: Path, num_adapters: int, rank: int, seed: int) -> str:
    """Writes adapters of a model's shape; returns the words after --lora_modules.

    Raises UserError for counts below 1.
    """
    for name, value in (("num_adapters", num_adapters), ("rank", rank)):
        if value < 1:
            raise UserError(f"--{name} is {value} (allowed: 1 or more)")
    spec, reader = read_spec(model)
    plan, _ = plan_of(spec, reader)
    words = []
    for index in range(num_adapters):
        write_adapter(plan, output_dir / str(index), rank, seed + index)
        words.append(f"{index}={output_dir / str(index)}")
    return " ".join(words)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(_: Signals) -> int:
        words = sys.argv[1:] if argv is None else argv
        flags = parse_flags(words, FLAGS, PROG, __doc__ or "", USAGE)
        for name in ("model_name_or_path", "output_dir"):
            if flags[name] is None:
                raise UserError(f"--{name} is missing; {PROG} --help lists the flags")
        directory = Path(flags["output_dir"])
        counts = (flags["num_adapters"], flags["rank"], flags["seed"])
        show(f"--lora_modules {write_adapters(flags['model_name_or_path'], directory, *counts)}")
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
