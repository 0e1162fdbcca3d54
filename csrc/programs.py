"""Compiles programs that call the CUDA kernels past the operators, on a machine with nvcc.

    python csrc/programs.py tests/gpu/native/products_sm90.cu

prints where each program is. As a kernel's, its name says what it is compiled for. The kernels'
objects are those of the CUDA library's build where it was made here, so that they are compiled
once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import build
from predict.device.devices import CUDA_LIBRARY_NAME
from predict.device.library import read_metadata
from predict.errors import UserError

FOLDER = build.BUILD_DIR / "cuda"  # the CUDA library's: commands that are the same run once
NINJA_NAME = "programs.ninja"
ARCHIVE_NAME = "programs/libkernels.a"


def architectures(toolkit: build.CudaToolkit) -> tuple[str, ...]:
    """Returns what to compile for: as the CUDA library that was built here, else this GPU."""
    library = build.LIBRARY_DIR / CUDA_LIBRARY_NAME
    if library.is_file() and (FOLDER / "build.ninja").is_file():
        try:
            return read_metadata(library).architectures
        except UserError:
            pass  # of another version: nothing of it can be used again
    return build.chosen_architectures(toolkit.nvcc)


def program_path(source: Path) -> Path:
    """Returns where the program of `source` is once it is compiled."""
    return FOLDER / "programs" / source.stem


def ninja_text(toolkit: build.CudaToolkit, chosen: tuple[str, ...], sources: Sequence[Path]) -> str:
    """Returns the text of the ninja file that makes the programs of `sources`.

    Every kernel is in an archive, of which the linker takes what the program calls. References use
    all cores. Raises build.BuildError for a program of another architecture.
    """
    targets = build.cuda_targets(chosen)
    kernels = " ".join(build.object_path(kernel) for kernel in targets)
    lines = [
        *build.cuda_rule(toolkit),
        "rule archive",
        "  command = rm -f $out && ar rcs $out $in",
        "  description = archive $out",
        *build.link_rule(
            "program",
            f"'{build.find_compiler()}' -fopenmp $in -L'{toolkit.libraries}' "
            f"{' '.join(build.CUDA_LIBRARIES)} -lpthread",
        ),
    ]
    for kernel, flags in targets.items():
        lines += build.object_lines(kernel, flags)
    lines.append(f"build {ARCHIVE_NAME}: archive {kernels}")
    for source in sources:
        program = program_path(source).relative_to(FOLDER)
        own = build.source_architectures(source, chosen)
        if not own:
            raise build.BuildError(f"{source.name} is not for {', '.join(chosen)}, by its name")
        lines += [
            f"build {program}.o: cuda {build.escaped(source.resolve())}",
            f"  flags = {build.target_flags(own)} -Xcompiler -fopenmp",
            f"  name = {source.name}",
            f"build {program}: program {program}.o {ARCHIVE_NAME}",
        ]
    return "\n".join([*lines, ""])


def compile_programs(sources: Sequence[Path], jobs: int | None = None) -> list[Path]:
    """Compiles what is not up to date; returns the programs' paths. Raises build.BuildError."""
    toolkit = build.find_cuda_toolkit()
    text = ninja_text(toolkit, architectures(toolkit), sources)
    with build.locked(FOLDER):
        build.run_ninja(FOLDER, text, jobs or build.num_jobs(), name=NINJA_NAME)
    return [program_path(source) for source in sources]


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="programs.py", description="Compiles programs beside the CUDA kernels."
    )
    parser.add_argument("sources", type=Path, nargs="+", metavar="FILE.cu")
    parser.add_argument(
        "--jobs", type=int, default=None, help="compilers at once (default: MAX_JOBS or all cores)"
    )
    arguments = parser.parse_args()
    for source in arguments.sources:
        if not source.is_file():
            print(f"programs.py: {source} is not a file", file=sys.stderr)
            return 1
    try:
        for program in compile_programs(arguments.sources, arguments.jobs):
            print(program.relative_to(build.ROOT))
    except build.BuildError as error:
        print(f"programs.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
