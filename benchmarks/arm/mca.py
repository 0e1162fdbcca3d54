"""What llvm-mca says of the kernels' inner loops on Arm's server cores. Nothing is measured.

    python benchmarks/arm/mca.py

prints the table of docs/devices.md: it compiles the kernels for aarch64 with Debian's cross
compiler, takes the innermost loop of each from the assembly, and asks llvm-mca how many cycles an
iteration takes where every load hits L1. Memory, caches and prefetches are not in it. Needs
g++-aarch64-linux-gnu and llvm-19.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
CORES = ("neoverse-n2", "neoverse-v2")
COMPILERS = ("aarch64-linux-gnu-g++", "aarch64-linux-gnu-g++-12")
MCAS = ("llvm-mca-19",)  # 16 takes neoverse-v2 for an N2
FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-S", f"-I{CSRC / 'include'}", f"-I{CSRC}")
ITERATIONS = 200


@dataclass(frozen=True)
class Kernel:
    """An inner loop: its name here, source, function, and what multiplies in it."""

    name: str
    kernel_set: str
    rows: int
    source: str
    function: str  # of the demangled name, without the set's namespace
    multiply: str  # mnemonics
    weight_bytes: float  # that one of them has as its operand
    rows_at_once: int = 1

    def pattern(self) -> str:
        """A regular expression for the demangled name."""
        return rf"{self.kernel_set}::{re.escape(self.function)}"


def dense(name: str, kernel_set: str, product: str, multiply: str, size: float) -> list[Kernel]:
    """The kernels of dense weights, of one row and of a tile."""
    product = f"regatta::cpu::{kernel_set}::dense::{product}"
    return [
        Kernel(
            name,
            kernel_set,
            rows,
            "gemm_dense",
            f"dense::multiply<{product}, 1, false, {rows}>",
            multiply,
            size,
        )
        for rows in (1, 3)
    ]


def codes(kernel_set: str, multiply: str, halves: int) -> list[Kernel]:
    """The kernels of int8 rows, with one scale each: a8w8 and w4a8."""
    return [
        Kernel(
            f"{bits}-bit codes, int8 rows",
            kernel_set,
            3,
            "gemm_a8w8",
            f"int8::multiply<{bits}, false, false, 1, false, 3>",
            multiply,
            16 * bits / 8 / halves,
        )
        for bits in (8, 4)
    ]


def kernels() -> list[Kernel]:
    """All rows of the table."""
    pair = "regatta::cpu::neon_bf16::dense::PairProduct"
    space, kind = "regatta::cpu::neon_bf16::codes", "regatta::cpu::CodeKind"
    return [
        *dense("float32", "neon", "Product<float>", "fmla", 16),
        *dense("float16", "neon", "Product<regatta::fp16>", "fmla", 8),
        *dense("bfloat16", "neon", "Product<regatta::bf16>", "fmla", 8),
        *(
            Kernel(
                "bfloat16",
                "neon_bf16",
                rows,
                "gemm_dense",
                f"dense::multiply<{pair}, 1, false, {rows}>",
                "bfdot",
                16,
            )
            for rows in (1, 3)
        ),
        Kernel(
            "bfloat16 in quads", "neon_bf16", 6, "gemm_dense", "quads::multiply<6>", "bfmmla", 16, 2
        ),
        *codes("neon", "smull2?", 2),
        *codes("neon_dot", "sdot", 1),
        *codes("neon_bf16", "usdot", 1),
        *(
            Kernel(
                f"{bits}-bit codes in eights, int8 rows",
                "neon_bf16",
                6,
                "gemm_a8w8",
                f"int8::multiply_quads<{bits}, false, false, 6>",
                "usmmla",
                16 * bits / 8,
                2,
            )
            for bits in (8, 4)
        ),
        *(
            Kernel(
                f"{name}, bfloat16 rows",
                "neon_bf16",
                3,
                "gemm_codes",
                f"codes::multiply<{space}::Pairs<({kind}){i}, false>, 1, false, 3>",
                "bfdot",
                16 * bits / 16,
            )
            for i, name, bits in (
                (0, "e2m1 codes", 4),
                (1, "4-bit codes", 4),
                (2, "8-bit codes", 8),
            )
        ),
        Kernel(
            "scores, values of float32",
            "neon",
            6,
            "paged_attention",
            "Product<false>::run<6, 4>",
            "fmla",
            16,
        ),
        Kernel(
            "scores, values of bfloat16",
            "neon_bf16",
            6,
            "paged_attention",
            "Product<true>::run<6, 4>",
            "bfdot",
            16,
        ),
    ]


def program(names: Sequence[str]) -> str:
    """The first of `names` that is installed."""
    for name in names:
        path = shutil.which(name)
        if path:
            return path
    sys.exit(f"mca.py: none of {', '.join(names)} is installed")


def output(*command: str, text: str = "") -> str:
    """What a command prints."""
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@cache
def functions(source: str) -> dict[str, str]:
    """The bodies of a source's functions, by demangled name."""
    with tempfile.NamedTemporaryFile(suffix=".s") as file:
        output(program(COMPILERS), *FLAGS, str(CSRC / "cpu" / f"{source}.cc"), "-o", file.name)
        text = Path(file.name).read_text(encoding="utf-8")
    bodies = re.findall(r"^(_Z\w+):\n(.*?)\n\t\.size\t\1", text, re.M | re.S)
    names = output("c++filt", text="\n".join(name for name, _ in bodies)).splitlines()
    return {name: body for name, (_, body) in zip(names, bodies, strict=True)}


def inner_loop(body: str, multiply: str) -> list[str]:
    """The instructions of the loop that multiplies most, and has no other inside that does."""
    lines = body.splitlines()
    labels = {line[:-1]: i for i, line in enumerate(lines) if re.match(r"\.L\w+:", line)}
    loops = []
    for end, line in enumerate(lines):
        jump = re.match(r"\t(?:b(?:\.?[a-z]{2})?|[ct]bn?z)\t(?:.*, )?(\.L\w+)$", line)
        if jump and labels.get(jump[1], end) < end:
            loops.append((labels[jump[1]], end))
    found = {(a, b): [line for line in lines[a:b] if re.match(r"\t[a-z]", line)] for a, b in loops}
    found = {place: loop for place, loop in found.items() if count(loop, multiply)}
    innermost = [
        loop
        for a, loop in found.items()
        if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in found)
    ]
    return max(innermost, key=lambda loop: count(loop, multiply))


def count(loop: Sequence[str], multiply: str) -> int:
    """How many of its instructions multiply."""
    return sum(bool(re.match(rf"\t{multiply}\t", line)) for line in loop)


def cycles(core: str, instructions: Sequence[str]) -> tuple[float, dict[str, float]]:
    """Cycles of an iteration, and for how many of them each kind of unit is busy."""
    report = output(
        program(MCAS),
        "-mtriple=aarch64",
        f"-mcpu={core}",
        "-mattr=+bf16,+i8mm",
        f"-iterations={ITERATIONS}",
        text="\n".join([*instructions, ""]),
    )
    total = re.search(r"Total Cycles:\s+(\d+)", report)
    names = re.findall(r"^\[[\d.]+\]\s+- (\w+)$", report, re.M)
    pressure = re.search(r"Resource pressure per iteration:\n.*\n(.*)\n", report)
    assert total, report
    assert pressure, report
    busy: dict[str, float] = {}
    for name, value in zip(names, pressure[1].split(), strict=True):
        kind = re.sub(r"^\w+?Unit", "", name)[:1]
        busy[kind] = max(busy.get(kind, 0.0), 0.0 if value == "-" else float(value))
    return int(total[1]) / ITERATIONS, busy


@cache
def rate(core: str, multiply: str) -> float:
    """How many such instructions a cycle, where none waits for another."""
    name = multiply.replace("2?", "")
    shapes = {
        "fmla": "4s, v30.4s, v31.4s",
        "bfdot": "4s, v30.8h, v31.8h",
        "bfmmla": "4s, v30.8h, v31.8h",
        "smull": "8h, v30.8b, v31.8b",
    }
    shape = shapes.get(name, "4s, v30.16b, v31.16b")
    chain = [f"\t{name}\tv{i}.{shape}" for i in range(28)]
    return len(chain) / cycles(core, chain)[0]


UNITS = {"V": "vector units", "L": "loads", "M": "integer units", "S": "integer units"}


def bound(share: float, needed: float, busy: dict[str, float]) -> str:
    """What an iteration's cycles go to."""
    if share >= 0.9:
        return "multipliers"
    kind = max(busy, key=lambda unit: busy[unit])
    if busy[kind] >= 0.9 * needed:
        return UNITS.get(kind, kind)
    return "instructions, and waiting for sums"


def main() -> None:
    """Prints the table."""
    version = output(program(MCAS), "--version")
    found = re.search(r"LLVM version [\d.]+", version)
    assert found, version
    print(f"Made by `python benchmarks/arm/mca.py` with {found[0]} and GCC 12.\n")
    columns = [
        f"{core}: cycles for 64 bytes | share of its multiply rate | bound" for core in CORES
    ]
    print(f"| inner loop | set | rows | {' | '.join(columns)} |")
    print(f"|{'---|' * (3 + 3 * len(CORES))}")
    for kernel in kernels():
        bodies = functions(kernel.source)
        body = next(bodies[name] for name in bodies if re.search(kernel.pattern(), name))
        loop = inner_loop(body, kernel.multiply)
        products = count(loop, kernel.multiply)
        weights = products / kernel.rows * kernel.rows_at_once * kernel.weight_bytes
        cells = []
        for core in CORES:
            needed, busy = cycles(core, loop)
            share = products / rate(core, kernel.multiply) / needed
            cells += [f"{needed * 64 / weights:.1f}", f"{share:.0%}", bound(share, needed, busy)]
        print(f"| {kernel.name} | `{kernel.kernel_set}` | {kernel.rows} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
