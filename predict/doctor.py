"""Reports what this machine and this installation offer: python -m predict.doctor [--json].

Exit status 0 when the compiled operators load and everything needed is installed; else 1, with the
problems and what to do about each at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from predict.config.schemes import gpu_kernels
from predict.device import devices, library
from predict.errors import UserError
from predict.ranks.front import SLOT_BYTES
from predict.ranks.gpus import sums_of
from predict.system import host

NEEDED = ("numpy", "safetensors", "tokenizers", "sentencepiece", "jinja2", "tqdm")
OPTIONAL = ("ninja", "paddlenlp", "torch", "transformers", "pytest", "hypothesis", "ruff", "mypy")
# Features that kernels use, as /proc/cpuinfo spells them; used when there is no library to ask.
CPU_FLAGS = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "avx512_bf16"),
    "amx_bf16",
    "amx_int8",
    *("asimd", "asimddp", "i8mm", "bf16"),  # on Arm
)
GIB = 1 << 30
# How ranks of a model add their parts: of any size, for any number of ranks.
SUMS = f"each rank adds all parts out of shared memory, {SLOT_BYTES >> 10} KiB at a time (CPU)"

Report = dict[str, Any]


def collect() -> Report:
    """Returns the report: one entry per section, and "problems", a list of sentences."""
    problems: list[str] = []
    paddle = _paddle(problems)
    state, info = _library(problems, paddle is not None)
    cuda_library = _cuda_library(problems)
    packages = {name: _version(name) for name in (*NEEDED, *OPTIONAL)}
    missing = [name for name in NEEDED if packages[name] is None]
    if missing:
        problems.append(f"not installed: {', '.join(missing)}; run: pip install -e .")
    return {
        "regatta": _version("regatta"),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "paddle": paddle,
        "library": state,
        "cpu": _cpu(info),
        "memory": {
            "total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "available_bytes": host.available_memory_bytes(),
        },
        "sums": {"cpu": SUMS, "gpus": _gpu_sums()},
        "gpus": _gpus(),
        "cuda_library": cuda_library,
        "device_gpu": _device_gpu(),
        "kernels": info.get("kernels", {}),
        "packages": packages,
        "problems": problems,
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _paddle(problems: list[str]) -> Report | None:
    try:
        paddle = library.import_paddle()
    except ImportError as error:
        problems.append(f"Paddle does not import ({error}); run: pip install -e .")
        return None
    if _version("paddlepaddle") and _version("paddlepaddle-gpu"):
        problems.append(
            "paddlepaddle and paddlepaddle-gpu are both installed and share one folder; uninstall "
            "both, then install the one that you want"
        )
    return {
        "version": paddle.version.full_version,
        "commit": paddle.version.commit,
        "cuda": paddle.is_compiled_with_cuda(),
        "plugin_devices": sorted(paddle.device.get_all_custom_device_type()),
        "devices": [
            f"{name}:{index}"
            for name, count in sorted(devices.registered().items())
            for index in range(count)
        ],
    }


def _library(problems: list[str], has_paddle: bool) -> tuple[Report, dict[str, Any]]:
    """Returns the library's state, and its own report on CPU and kernels ({} without one)."""
    report: Report = {"state": "absent", "path": None}
    try:
        path = library.find()
        if path is None:
            problems.append(
                f"no compiled operators: {library.absence_reason()}; build them: "
                f"{library.build_command()}"
            )
            return report, {}
        report.update(state="refused", path=str(path))
        built = library.read_metadata(path)
        report.update(outdated=library.is_outdated(built))
        report.update(paddle_version=built.paddle_version, compiler=built.compiler, abi=built.abi)
        report.update(key=built.key, sanitizer=built.sanitizer)
        library.verify(built, path)
        if not has_paddle:
            return report, {}
        loaded = library.require()
    except library.LibraryError as error:
        problems.append(str(error))
        return report, {}
    report.update(state="loaded", num_operators=len(loaded.operators))
    if report["outdated"]:
        problems.append(
            f"csrc/ has changed since the library was built; rebuild: {library.build_command(path)}"
        )
    return report, loaded.info()


def _cpu(info: dict[str, Any]) -> Report:
    found = host.processor()
    flags = (found.get("flags") or found.get("Features", "")).split()
    return {
        "model": found.get("model name", "unknown"),
        "features": info.get("features") or [flag for flag in CPU_FLAGS if flag in flags],
        "num_cores": os.cpu_count(),
        "num_allowed_cores": len(os.sched_getaffinity(0)),
        "num_threads": info.get("threads"),
        "instruction_set": info.get("instruction_set"),
    }


def _gpus() -> Report:
    """The NVIDIA driver and GPUs, by nvidia-smi: names, memory; empty without a driver."""
    report: Report = {
        "driver": Path("/proc/driver/nvidia/version").is_file(),
        "nvcc": shutil.which("nvcc"),
        "devices": [],
    }
    program = shutil.which("nvidia-smi")
    if program is None:
        return report
    query = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        process = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return report
    if process.returncode == 0:
        report["devices"] = [line.strip() for line in process.stdout.splitlines() if line.strip()]
    return report


def _gpu_sums() -> str:
    """How ranks on this machine's GPUs add their parts; "" where there are no two."""
    try:
        info = devices.driver_info()
    except UserError:  # the plugin is not built
        return ""
    if len(info.gpus) < 2:
        return ""
    version = _version("nvidia-nccl-cu13")
    return f"{sums_of(info)}; NCCL {version or 'is not installed'}"


def _cuda_library(problems: list[str]) -> Report | None:
    """The CUDA library's build; None without one, which only a GPU needs."""
    path = library.LIBRARY_DIR / devices.CUDA_LIBRARY_NAME
    if not path.with_suffix(".json").exists():
        return None
    report: Report = {"path": str(path), "architectures": [], "compiler": None, "key": None}
    report["outdated"] = False
    try:
        built = library.read_metadata(path)
        report.update(architectures=list(built.architectures), compiler=built.compiler)
        report.update(key=built.key)
        library.verify(built, path)
        devices.verify_parts(path)
    except library.LibraryError as error:
        problems.append(str(error))
        return report
    current = (
        devices.cuda_source_digest(library.SOURCE_DIR),
        library.source_digest(library.SOURCE_DIR),
    )
    digests = built.cuda_sources_digest, built.sources_digest
    report["outdated"] = library.SOURCE_DIR.is_dir() and current != digests
    if report["outdated"]:
        problems.append(
            f"csrc/ has changed since {path.name} was built; rebuild: {devices.build_command()}"
        )
    return report


def _device_gpu() -> Report:
    """The device of --device gpu and the reason for it, or why there is none.

    quant_types: quant_type -> kernels that run it there.
    """
    try:
        device = devices.choose("gpu")
    except UserError as error:
        return {"name": None, "reason": str(error), "quant_types": {}}
    report = {"name": device.name, "reason": device.reason, "quant_types": {}}
    try:
        gpu = devices.driver_info().gpus[device.index]
    except (UserError, IndexError):
        return report
    report["quant_types"] = gpu_kernels(gpu.capability)
    return report


def chosen_kernel(candidates: Sequence[dict[str, Any]]) -> str:
    """The first candidate that accepts, after the refusals before it; as one line of text."""
    refusals: list[str] = []
    for candidate in candidates:
        if candidate["accepts"]:
            note = f"  (not {'; '.join(refusals)})" if refusals else ""
            return f"{candidate['name']}{note}"
        refusals.append(f"{candidate['name']}: {candidate['reason']}")
    return f"none ({'; '.join(refusals)})"


def render(report: Report) -> str:
    """Returns the report as text for a terminal."""
    paddle, state, cpu, gpus = report["paddle"], report["library"], report["cpu"], report["gpus"]
    gpu = report["device_gpu"]
    quant_types = gpu["quant_types"].items()
    lines = [
        ("regatta", report["regatta"] or "not installed (running from a checkout)"),
        ("Python", f"{report['python']['version']}  {report['python']['executable']}"),
        ("Paddle", "does not import" if paddle is None else _paddle_line(paddle)),
        ("library", _library_line(state)),
        ("CPU", f"{cpu['model']}: {' '.join(cpu['features'])}"),
        ("cores", f"{cpu['num_allowed_cores']} of {cpu['num_cores']} allowed"),
        ("threads", str(cpu["num_threads"] or "Paddle's choice")),
        ("products by", cpu["instruction_set"] or "Paddle's choice"),
        ("sums of ranks", "; ".join(filter(None, report["sums"].values()))),
        ("memory", "{available_bytes:.1f} of {total_bytes:.1f} GiB available".format(
            **{name: value / GIB for name, value in report["memory"].items()}
        )),
        ("GPUs", "; ".join(gpus["devices"]) or _no_gpu_line(gpus)),
        ("CUDA library", _cuda_library_line(report["cuda_library"])),
        ("--device gpu", f"{gpu['name'] or 'not usable'}: {gpu['reason']}"),
        ("on a GPU", ", ".join(f"{name} ({kernels})" for name, kernels in quant_types)
         or "no quant_type"),
        ("devices", _devices_line(paddle)),
    ]  # fmt: skip
    width = max(len(name) for name, _ in lines) + 2
    text = [f"{name:<{width}}{value}" for name, value in lines]
    if report["kernels"]:
        text += ["", "kernel of each operator"]
        width = max(len(name) for name in report["kernels"]) + 2
        for name, candidates in sorted(report["kernels"].items()):
            text.append(f"  {name:<{width}}{chosen_kernel(candidates)}")
    found = {name: version for name, version in report["packages"].items() if version}
    text += ["", "packages  " + ", ".join(f"{name} {version}" for name, version in found.items())]
    text += [""] + [f"PROBLEM: {problem}" for problem in report["problems"]]
    if not report["problems"]:
        text.append("everything that the compiled path needs is here")
    return "\n".join(text)


def _paddle_line(paddle: Report) -> str:
    kind = "CUDA build" if paddle["cuda"] else "CPU build"
    devices = ", ".join(paddle["plugin_devices"])
    return f"{paddle['version']} ({kind}, commit {paddle['commit'][:10]})" + (
        f", plugin devices: {devices}" if devices else ""
    )


def _library_line(state: Report) -> str:
    if state["path"] is None:
        return "absent: plain-Paddle operators would be used"
    built = "?"
    if "paddle_version" in state:
        built = f"interface {state['abi']}, for Paddle {state['paddle_version']}"
        built += f", by {state['compiler']}, build {state['key'][:12]}"
        built += f", sanitizer {state['sanitizer']}" if state["sanitizer"] else ""
    count = f", {state['num_operators']} operators" if state["state"] == "loaded" else ""
    return f"{state['state']}: {state['path']} ({built}{count})"


def _cuda_library_line(state: Report | None) -> str:
    if state is None:
        return f"absent (for an NVIDIA GPU: {devices.build_command()})"
    built = ", ".join(f"sm_{name}" for name in state["architectures"])
    return f"{state['path']} (for {built}, by {state['compiler']})"


def _devices_line(paddle: Report | None) -> str:
    """What --device takes besides cpu and gpu."""
    names = paddle["devices"] if paddle else []
    if not names:
        return "no others that Paddle has registered"
    return f"{', '.join(names)}: plain operators, with --device {names[0]}"


def _no_gpu_line(gpus: Report) -> str:
    if gpus["driver"]:
        return "none seen, though an NVIDIA driver is loaded; is nvidia-smi on PATH?"
    return "none (no NVIDIA driver)"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    arguments = parser.parse_args(argv)
    report = collect()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
