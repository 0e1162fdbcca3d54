"""How long a model takes to be ready, by quant_type: `python -m predict.bench.loading`.

Each run is a process of its own, from its start to an engine that answers: imports, weights read or
made up, rounded and packed, caches, graphs. Where the checkpoint is not in the page cache, the disk
is measured; --repetitions shows it. With --write_checkpoint a random checkpoint of the model's
shape is written to a folder first, and read from there.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from predict.system.interpreter import check_interpreter

if __name__ == "__main__":
    check_interpreter()

from predict.bench.record import command_line
from predict.bench.report import write_json
from predict.cli.command import run_command
from predict.cli.flags import Flag, parse_flags
from predict.config.engine import EngineConfig
from predict.config.quantization import parse_quant_type
from predict.config.schemes import SCHEMES, scheme_info
from predict.errors import UserError
from predict.system.console import say, show
from predict.system.host import process_age_seconds
from predict.system.outputs import check_output
from predict.system.signals import Signals

PROG = "python -m predict.bench.loading"
GROUP = "Loading benchmark"
# Each as it is used: those of 4 bits with groups.
TYPES = [
    "none",
    *(row.name + ":128" * (row.codes == "int4") for row in SCHEMES.values()),
]
# fmt: off
FLAGS = (
    Flag(GROUP, "model_name_or_path", "str", None,
         "Directory of the model; with --load_format dummy or --write_checkpoint its config.json "
         "is enough."),
    Flag(GROUP, "load_format", "str", "auto",
         "auto reads the checkpoint, dummy makes random weights.", choices=("auto", "dummy")),
    Flag(GROUP, "quant_types", "str", ",".join(TYPES),
         "What --quant_type is set to, one after the other, separated by commas; :128 behind a "
         "name asks for groups of 128, of a8w8_fp8 for blocks of 128 x 128."),
    Flag(GROUP, "device", "str", "gpu", "cpu, gpu or gpu:N."),
    Flag(GROUP, "dtype", "str", "bfloat16", "Of activations and of weights that are not rounded."),
    Flag(GROUP, "repetitions", "int", 3, "Runs of each; the table has their median."),
    Flag(GROUP, "write_checkpoint", "str", None,
         "A folder to write random weights of the model's shape to, in bfloat16, and to read them "
         "from; it must not exist, or be empty."),
    Flag(GROUP, "output_file", "str", None, "Write the results as JSON."),
)
# fmt: on
HEADER = f"{'quant_type':<24}{'ready, s':>10}{'engine, s':>11}{'more, s':>9}{'memory, MiB':>13}"


def settings_of(name: str) -> dict[str, Any]:
    """The engine's settings for "quant_type" or "quant_type:group size"."""
    quant_type, _, size = name.partition(":")
    if quant_type == "none":
        return {}
    settings: dict[str, Any] = {"quant_type": quant_type}
    if size:
        if not size.isdecimal():
            raise UserError(f"--quant_types: {name!r} has no number behind the colon")
        if scheme_info(parse_quant_type(quant_type).scheme).has_blocks:
            settings["weight_block_size"] = (int(size), int(size))
        else:
            settings["weightonly_group_size"] = int(size)
    return settings


def time_one(settings: Mapping[str, Any]) -> dict[str, float]:
    """What one start takes, in a process that does nothing else.

    ready_s: since the process began. engine_s: of that, the engine's. memory_bytes: of the device,
    or of the process, in use at the most.
    """
    from predict.llm import LLM

    began = time.perf_counter()
    llm = LLM(EngineConfig(**settings))
    return {
        "engine_s": time.perf_counter() - began,
        "ready_s": process_age_seconds(),
        "memory_bytes": llm.stats().peak_memory_bytes,
    }


def in_own_process(settings: Mapping[str, Any]) -> dict[str, float]:
    """`time_one` in a new interpreter."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(time_one, settings).result()


def write_checkpoint(model: Path, folder: Path, seed: int = 0) -> None:
    """Writes config.json and random bfloat16 weights of its shape, a file per layer."""
    import json
    import shutil

    import numpy as np

    from predict.config.quantization import QuantSettings
    from predict.loading.build import expected_tensors
    from predict.loading.formats import INDEX
    from predict.loading.layouts.online import Online
    from predict.loading.model import read_spec
    from predict.loading.safetensors_writer import write
    from predict.loading.sources import RandomSource
    from predict.models import weight_names
    from predict.nn.weights import plan_weights

    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"--write_checkpoint {folder} is not empty; name another folder")
    spec, reader = read_spec(model)
    names = weight_names(reader)
    plan, source = plan_weights(spec, names), RandomSource(seed)
    shapes = expected_tensors(plan, Online(source, QuantSettings(), plan))
    layers = [names.layer.format(layer=index) for index in range(spec.num_layers)]
    files: dict[str, list[str]] = {layer: [] for layer in (*layers, "")}
    for name in shapes:
        files[next((layer for layer in layers if name.startswith(layer)), "")].append(name)
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    for number, members in enumerate(filter(None, files.values())):
        tensors = {}
        for name in members:
            rows, *columns = shapes[name]
            is_matrix = bool(columns)
            values = source.matrix((), (rows, columns[0])) if is_matrix else np.ones(rows)
            bits = values.astype(np.float32).view(np.uint32) >> 16  # cut off: they are random
            tensors[name] = ("BF16", bits.astype(np.uint16))
        file = f"model-{number:05}.safetensors"
        write(folder / file, tensors)
        places |= dict.fromkeys(members, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    for path in model.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX:
            shutil.copyfile(path, folder / path.name)


def run(asked: Mapping[str, Mapping[str, Any]], repetitions: int) -> list[dict[str, Any]]:
    """The runs of every quant_type, in turns: what else the machine does meets all of them.

    asked: the engine's settings by quant_type.
    """
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in asked}
    for _ in range(repetitions):
        for name, settings in asked.items():
            runs[name].append(in_own_process(settings))
            say(f"{name}: ready in {runs[name][-1]['ready_s']:.2f} s")
    return [{"quant_type": name, "runs": taken} for name, taken in runs.items()]


def median(result: Mapping[str, Any], key: str) -> float:
    """Of a result's runs."""
    return statistics.median(each[key] for each in result["runs"])


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Medians, and how much more than the first row each takes."""
    lines = [HEADER]
    for result in results:
        ready = median(result, "ready_s")
        lines.append(
            f"{result['quant_type']:<24}{ready:>10.2f}{median(result, 'engine_s'):>11.2f}"
            f"{ready - median(results[0], 'ready_s'):>9.2f}"
            f"{int(median(result, 'memory_bytes')) >> 20:>13,}"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(signals: Signals) -> int:
        words = sys.argv[1:] if argv is None else argv
        flags = parse_flags(words, FLAGS, PROG, __doc__ or "")
        if flags["model_name_or_path"] is None:
            raise UserError("--model_name_or_path is missing: a directory with a config.json")
        if flags["repetitions"] < 1:
            raise UserError(f"--repetitions {flags['repetitions']} is not 1 or more")
        model = flags["write_checkpoint"] or flags["model_name_or_path"]
        common = {
            "model_name_or_path": model,
            "device": flags["device"],
            "dtype": flags["dtype"],
            "load_format": flags["load_format"],
            "inference_model": True,
            "attention": "append",
        }
        names = flags["quant_types"].split(",")
        asked = {name: {**common, **settings_of(name)} for name in names}
        for settings in asked.values():
            EngineConfig(**settings)  # what it refuses is refused before anything runs
        if flags["output_file"] is not None:
            check_output("output_file", flags["output_file"])
        if flags["write_checkpoint"] is not None:
            if flags["load_format"] == "dummy":
                raise UserError("--load_format dummy reads nothing; leave --write_checkpoint out")
            write_checkpoint(Path(flags["model_name_or_path"]), Path(model))
        results = run(asked, flags["repetitions"])
        show(table(results))
        if flags["output_file"] is not None:
            made = {"command": command_line(PROG, words), "results": results}
            write_json(made, flags["output_file"])
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
