"""Builds the CPU operator library by hand: python csrc/setup_cpu.py install."""

from __future__ import annotations

import argparse
import sys

import build


def main() -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="setup_cpu.py", description="Builds predict/lib/libregatta_cpu.so from csrc/."
    )
    parser.add_argument("command", choices=("install", "clean"))
    parser.add_argument(
        "--jobs", type=int, default=None, help="compilers at once (default: MAX_JOBS or all cores)"
    )
    parser.add_argument(
        "--sanitize",
        default="",
        metavar="NAME[,NAME]",
        help="build for finding errors in the operators: address, undefined, address,undefined or "
        "thread; into predict/lib/sanitize-NAME/, beside the library that is used",
    )
    arguments = parser.parse_args()
    if arguments.command == "clean":
        build.clean()
        return 0
    try:
        sanitizers = [name for name in arguments.sanitize.split(",") if name]
        result = build.build_cpu_library(arguments.jobs, sanitizers=sanitizers)
        print(result.summary())
        if sanitizers:
            print(build.sanitized_usage(result.library, sanitizers))
    except build.BuildError as error:
        print(f"setup_cpu.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
