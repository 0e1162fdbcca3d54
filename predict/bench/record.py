"""The file that a benchmark writes: device, versions, command and rows, as in benchmarks/.

benchmarks/README.md has its fields. A row has medians in `values`, and in `spread` of each how many
repetitions there were, their quartiles, the least and the most.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from predict.device.devices import kind_of
from predict.errors import UserError
from predict.system.host import processor

RecordRow = dict[str, Any]
Suite = dict[str, Any]
SPREAD = "values are medians of n repetitions; spread has their quartiles, the least and the most"


def record(
    device: Mapping[str, Any],
    versions: Mapping[str, Any],
    settings: Mapping[str, Any],
    suites: Mapping[str, Suite],
) -> dict[str, Any]:
    """The whole file, with today's date."""
    return {
        "device": dict(device),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "versions": dict(versions),
        "settings": dict(settings),
        "suites": dict(suites),
    }


def suite(rows: Sequence[RecordRow], units: Mapping[str, str], command: str, method: str) -> Suite:
    """Rows that one command made; units: of the columns that a row has no own for."""
    return {
        "command": command,
        "method": method,
        "spread": SPREAD,
        "units": dict(units),
        "rows": list(rows),
    }


def repeated_row(name: str, samples: Mapping[str, Sequence[float]]) -> RecordRow:
    """The row of a case that was measured several times: metric -> a number per repetition."""
    return {
        "name": name,
        "values": {metric: statistics.median(each) for metric, each in samples.items()},
        "spread": {metric: spread_of(each) for metric, each in samples.items()},
    }


def spread_of(samples: Sequence[float]) -> dict[str, float]:
    """How many repetitions there are, and how far they lie apart."""
    least, q1, q3, most = np.percentile(samples, (0, 25, 75, 100)).tolist()
    return {"n": len(samples), "min": least, "q1": q1, "q3": q3, "max": most}


def command_line(prog: str, words: Sequence[str]) -> str:
    """A command as a shell takes it."""
    return f"{prog} {shlex.join(words)}"


def client_versions() -> dict[str, Any]:
    """Of this project and of Python: what a command stands on that runs no model."""
    try:
        own = importlib.metadata.version("regatta")
    except importlib.metadata.PackageNotFoundError:  # a checkout that is on the path
        own = "unknown"
    return {"regatta": own, "python": platform.python_version()}


def own_versions() -> dict[str, Any]:
    """Of this project and what it stands on."""
    import paddle
    from predict.device import library

    found = library.find()
    versions = {**client_versions(), "paddle": paddle.__version__}
    if found is not None:
        versions["compiler"] = library.require().metadata.compiler
    return versions


def check_measured(device: str) -> None:
    """Raises UserError for a device that has no limits here to be held against."""
    if kind_of(device) not in ("cpu", "gpu"):
        raise UserError(
            f"--device {device} is not measured: rates are held against the limits of a CPU or a "
            "GPU (allowed: cpu, gpu, gpu:N); predict/predictor.py --benchmark takes its times"
        )


def cpu_device() -> dict[str, Any]:
    """This machine's processor, and what the compiled operators make of it."""
    from predict.device import library

    described = cpu_identity()
    if library.find() is not None:
        info = library.require().info()
        names = {"num_threads": "threads"} | {
            name: name for name in ("features", "instruction_set")
        }
        described |= {name: info.get(key) for name, key in names.items()}
    return described


def gpu_device(index: int) -> dict[str, Any]:
    """A GPU as the driver describes it."""
    from predict.device.devices import driver_info

    info = driver_info()
    gpu = info.gpus[index]
    return {
        "name": gpu.name,
        "architecture": gpu.architecture,
        "memory": f"{gpu.total_bytes >> 20:,} MiB",
        "driver_cuda": info.driver,
    }


def cpu_identity() -> dict[str, Any]:
    """The processor's name as the system has it, and its numbers.

    A virtual machine may call processors of several generations the same: family and model do not.
    """
    found = processor()
    numbers = {"family": found.get("cpu family", ""), "model": found.get("model", "")}
    return {
        "name": found.get("model name") or platform.processor() or platform.machine(),
        **{name: int(value) for name, value in numbers.items() if value.isdecimal()},
    }
