"""Each kernel past the operators: the programs of native/, with tiles and kernels forced.

They are compiled with nvcc when they are first asked for (csrc/programs.py), minutes where the CUDA
library was not built on this machine.
"""

from __future__ import annotations

import gc
import re
import subprocess
from pathlib import Path

import pytest

import build
import programs
from predict.device import devices
from tests.support.gpu_sanitizer import sanitizer

NATIVE = Path(__file__).parent / "native"
HOPPER, FLOAT8, BFLOAT16 = (9, 0), (8, 9), (8, 0)
# Program and part; those of Hopper's own kernels link and run there alone.
CODES = ("fp8", "int8", "blocks")
PACKED = ("weight_int8", "weight_int4", "groups_int8", "mxfp4", "w4a8")
PARTS = {
    "products_sm90": ("bf16", "float16", "float32", *CODES, "tiles", "blas", *PACKED),
    "quantize_sm90": ("rows", "products", "unfolded"),
    "groups_sm90": ("bf16", *CODES, *PACKED),
    "latent_sm90": ("few", "many", "trees", "heads"),
    "attention": ("spans", "trees", "dense", "int8_static", "int8_dynamic", "fp8", "int4"),
    "portable": ("weight_int8", "weight_int4", *CODES),
    "experts": ("lists", "routes", "sums"),
    "rows": ("float32", "bfloat16", "float16"),
    "sampling": ("adjust", "sample"),
    "delta_net": ("any", "steps", "chunks", "cuts", "extremes", "long", "conv"),
    "ranks": ("sums", "norms", "columns", "largest", "ends"),
}
CASES = [(program, part) for program, parts in PARTS.items() for part in parts]
# For compute-sanitizer, with what makes few cases of a part: a word, or rounds of random ones.
SMALL = [
    *(
        ("attention", part, "small")
        for part in ("spans", "dense", "int8_static", "int8_dynamic", "fp8", "int4")
    ),
    ("experts", "lists", "20"),
    ("experts", "sums", "3"),
]


def needed(program: str, part: str) -> tuple[int, int]:
    """The oldest compute capability that has all that is checked."""
    if program.endswith("_sm90"):
        return HOPPER
    return FLOAT8 if part in ("fp8", "blocks") else BFLOAT16


def compiled(gpu: devices.Device, program: str, part: str) -> Path:
    """The program; skips where it cannot be compiled or is not for this GPU."""
    capability = devices.driver_info().gpus[gpu.index].capability
    oldest = needed(program, part)
    if capability < oldest or (oldest == HOPPER and capability != HOPPER):
        pytest.skip(
            f"{program} {part} needs compute capability {oldest}, and this GPU has {capability}"
        )
    try:
        build.find_cuda_toolkit(), build.find_compiler()
    except build.BuildError as error:
        pytest.skip(str(error))
    # What earlier tests of this process leave in its pool is not there for another's.
    gc.collect()
    devices.release_cached(gpu)
    return programs.compile_programs([NATIVE / f"{program}.cu"])[0]


def run(*command: str | Path) -> tuple[int, str]:
    process = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return process.returncode, process.stdout[-6000:]


@pytest.mark.parametrize(("program", "part"), CASES)
def test_kernels_compute_what_their_references_do(
    gpu: devices.Device, program: str, part: str
) -> None:
    status, output = run(compiled(gpu, program, part), "check", part)
    assert status == 0, output
    counts = [(int(cases), int(bad)) for cases, bad in counted(output)]
    if not counts and "without cuBLASLt" in output:
        pytest.skip(output)
    assert counts, output
    assert all(cases > 0 and bad == 0 for cases, bad in counts), output


def counted(output: str) -> list[tuple[str, str]]:
    return re.findall(r"(\d+) cases, (\d+) failures", output)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "part", "size"), SMALL)
def test_kernels_touch_only_their_own_memory(
    gpu: devices.Device, program: str, part: str, size: str
) -> None:
    checker = sanitizer()
    if checker is None:
        pytest.skip("compute-sanitizer is neither on PATH nor beside nvcc")
    path = compiled(gpu, program, part)
    status, output = run(checker, "--error-exitcode", "9", path, "check", part, size)
    assert status == 0, output
    assert "ERROR SUMMARY: 0 errors" in output
    assert counted(output), output
