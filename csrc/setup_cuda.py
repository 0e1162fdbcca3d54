"""Builds for NVIDIA GPUs, on a machine with nvcc: python csrc/setup_cuda.py install."""

from __future__ import annotations

import argparse
import sys
import time

import build


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="setup_cuda.py",
        description="Builds the CPU library, the CUDA library and Paddle's GPU plugin "
        "(predict/lib/). No GPU is needed.",
    )
    parser.add_argument("command", choices=("install", "clean"))
    parser.add_argument(
        "--arch",
        nargs="+",
        default=[],
        metavar="NN",
        help="GPU architectures, as in 80 90a, or all (default: those of this machine's GPUs; "
        f"without one all that nvcc knows of {' '.join(build.CUDA_ARCHITECTURES)})",
    )
    parser.add_argument(
        "--jobs", type=int, default=None, help="compilers at once (default: MAX_JOBS or all cores)"
    )
    arguments = parser.parse_args()
    if arguments.command == "clean":
        build.clean()
        return 0
    try:
        started = time.monotonic()
        toolkit = build.find_cuda_toolkit()
        # First: whoever calls this wants CUDA, not a long CPU build ahead of a refusal.
        build.chosen_architectures(toolkit.nvcc, arguments.arch)
        print(build.build_cpu_library(arguments.jobs).summary())
        result = build.build_cuda_library(arguments.arch, arguments.jobs)
        print(result.summary())
        print(
            f"built for {' '.join(result.architectures)} in {time.monotonic() - started:.0f} s, "
            f"{arguments.jobs or build.num_jobs()} compilers at once"
        )
    except build.BuildError as error:
        print(f"setup_cuda.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
