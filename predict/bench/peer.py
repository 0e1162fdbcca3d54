"""llama.cpp beside Regatta on this CPU: `python -m predict.bench.peer --help`.

Both read one GGUF file of random weights, with as many threads, and take turns, each run a process
of its own. llama.cpp is timed by its own benchmark, llama-batched-bench, ours by
predict.bench.throughput. What is printed is llama.cpp's number, ours, and how many times as good
ours is, with the interval of the turns' ratios; and the memory that llama.cpp put its weights into,
which names the kernels that read them (AMX, CPU_REPACK). A case in which llama.cpp dies is said,
and the others go on.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from predict.bench.cases import Case, parse_cases
from predict.bench.compare import changes_of, table
from predict.bench.gguf_writer import TYPES, write_gguf
from predict.bench.outputs import Outputs
from predict.bench.record import command_line, cpu_device, own_versions, record
from predict.bench.turns import (
    LEAST_TURNS,
    TurnCommand,
    TurnNumbers,
    Turns,
    run_program,
    take_turns,
)
from predict.cli.command import command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.errors import EXIT_FAILURE, UserError, one_of
from predict.loading.model import read_spec
from predict.system.console import say, show
from predict.system.files import parse_json
from predict.system.progress import Progress
from predict.system.ranges import Range
from predict.system.signals import Signals

PROG = "python -m predict.bench.peer"
GROUP = "Both sides"
SHAPES = Path(__file__).resolve().parents[2] / "examples" / "shapes"
NAMES = ("llama.cpp", "regatta")
# Ours of predict.bench.throughput -> what is compared.
METRICS = {
    "prefill_tokens_per_s": "prompt_tokens_per_s",
    "decode_tokens_per_s": "decode_tokens_per_s",
}
# Weights are read into memory of their own, as ours are. It is --load-mode none, or --no-mmap of
# older versions, which refuse each other's flags and pass over each other's variables.
WEIGHTS_IN_MEMORY = {"LLAMA_ARG_LOAD_MODE": "none", "LLAMA_ARG_NO_MMAP": "1"}
TRIES = 8  # its log drops what is not written when the process ends, one time in five
VERBOSITY = "4"  # of its log, for the lines of BUFFER
BUFFER = re.compile(r"(\w+) model buffer size = *([\d.]+) MiB")
CONTEXT_STEP = 256  # llama.cpp rounds a sequence's context up to so many tokens
# fmt: off
FLAGS = (
    Flag(GROUP, "shapes", "strs", ["qwen2.5-0.5b"],
         "Networks: names of folders in examples/shapes, or folders with a config.json."),
    Flag(GROUP, "types", "strs", ["BF16"],
         "Weights of the layers, one after another, as GGUF calls them. The LM head beside Q8_0 "
         "and Q4_0 is Q8_0.", choices=tuple(TYPES)),
    Flag(GROUP, "cases", "strs", ["1x128x65", "8x128x65", "1x512x1"],
         "Sizes REQUESTSxINPUTxOUTPUT, as of predict.bench.throughput."),
    Flag(GROUP, "turns", "int", 7, "Turns of both sides.", allowed=Range(1, 1000)),
    Flag(GROUP, "num_threads", "int", None,
         "Threads of each side; when not given, the processors that this process may use.",
         allowed=Range(1, 1000)),
    Flag(GROUP, "batched_bench", "str", "llama-batched-bench",
         "llama.cpp's program: a path, or a name that is on PATH."),
    Flag(GROUP, "output_file", "str", None,
         "Write device, versions, and medians and spread of both sides as JSON."),
)
# fmt: on


class NoneLeftError(UserError):
    """llama.cpp died in every case."""


@dataclass(frozen=True)
class PeerWork:
    """One file, and what both sides do with it."""

    name: str  # shape and type
    file: Path
    cases: tuple[Case, ...]
    num_threads: int
    program: str
    dead: dict[str, str] = field(default_factory=dict)  # "name, case" -> how llama.cpp ended there
    buffers: set[str] = field(default_factory=set)  # of llama.cpp's weights

    def ours(self) -> TurnNumbers:
        """Of predict.bench.throughput, all cases in one process."""
        words = ["python", "-m", "predict.bench.throughput", "--model_name_or_path", str(self.file)]
        words += ["--device", "cpu", "--dtype", self.dtype, "--inference_model", "--append_attn"]
        words += ["--repetitions", "1", "--cases", ",".join(map(str, self.left()))]
        env = {"OMP_NUM_THREADS": str(self.num_threads)}
        rows = TurnCommand(words, env=env).file()["suites"]["throughput"]["rows"]
        return {
            f"{self.name}, {row['name']}": {
                metric: row["values"][own]
                for own, metric in METRICS.items()
                if row["values"].get(own, 0.0) > 0.0  # a difference of two times may be below 0
            }
            for row in rows
        }

    @property
    def dtype(self) -> str:
        """Of our activations; llama.cpp has float32, and rounds inside its products."""
        return "float32" if self.name.endswith(" F32") else "bfloat16"

    def left(self) -> list[Case]:
        """The cases in which llama.cpp has not died."""
        return [case for case in self.cases if f"{self.name}, {case}" not in self.dead]

    def theirs(self) -> TurnNumbers:
        """Of llama-batched-bench, a process for each case. Raises NoneLeftError."""
        found: TurnNumbers = {}
        for case in self.left():
            name = f"{self.name}, {case}"
            try:
                found[name] = self._theirs_of(case)
            except UserError as error:
                self.dead[name] = str(error)
        if not found:
            raise NoneLeftError(f"llama.cpp died in every case of {self.name}", 1)
        return found

    def _theirs_of(self, case: Case) -> dict[str, float]:
        """Rates of one batch of prompts, and of the steps behind it."""
        steps = case.output_len - 1
        length = -(-(case.input_len + case.output_len) // CONTEXT_STEP) * CONTEXT_STEP
        cache = "f32" if self.dtype == "float32" else "f16"
        sizes = {"-npp": case.input_len, "-ntg": max(steps, 1), "-npl": case.num_requests}
        sizes |= {"-c": case.num_requests * length, "-t": self.num_threads, "-ngl": 0}
        words = [self.program, "-m", str(self.file), "-fa", "on", "-ctk", cache, "-ctv", cache]
        words += ["--output-format", "jsonl", "-lv", VERBOSITY]
        words += [word for name, size in sizes.items() for word in (name, str(size))]
        env = {**os.environ, **WEIGHTS_IN_MEMORY}
        for _ in range(TRIES):
            done = run_program(words, None, env)
            lines = done.stdout.splitlines()
            line = next((line for line in lines if line.startswith("{")), "")
            found = parse_json(line, f"a line of {self.program}") if line else None
            if isinstance(found, dict):
                break
        else:
            raise UserError(f"{self.program} printed no line of JSON; a newer one does", 1)
        sizes_of = BUFFER.findall(done.stdout + done.stderr)
        self.buffers.update(f"{kind} {float(size):,.0f} MiB" for kind, size in sizes_of)
        count = case.num_requests
        values = {"prompt_tokens_per_s": count * case.input_len / float(found["t_pp"])}
        if steps:
            values["decode_tokens_per_s"] = count * steps / float(found["t_tg"])
        return values


def folder_of(shape: str) -> Path:
    """The folder with a shape's config.json. Raises UserError for what is none."""
    for folder in (SHAPES / shape, Path(shape)):
        if (folder / "config.json").is_file():
            return folder
    known = sorted(path.name for path in SHAPES.iterdir())
    raise one_of("shapes", shape, (*known, "a folder with a config.json"))


def parse(argv: Sequence[str]) -> tuple[FlagValues, tuple[Case, ...]]:
    """The flags and the cases of a command line. Raises UserError for what cannot be measured."""
    flags = parse_flags(argv, FLAGS, PROG, __doc__ or "", "[--flag [VALUE] ...]")
    cases = parse_cases(flags["cases"])
    for name in ("shapes", "cases", "types"):
        if not flags[name] or len(set(flags[name])) < len(flags[name]):
            raise UserError(f"--{name} is empty, or has one twice; give it each once")
    if shutil.which(flags["batched_bench"]) is None:
        raise UserError(
            f"{flags['batched_bench']} is not there: build llama.cpp's target llama-batched-bench "
            "(cmake -B build && cmake --build build --target llama-batched-bench), and name it "
            "with --batched_bench or put it on PATH"
        )
    Outputs(flags["output_file"]).check()
    return flags, cases


def measure(
    flags: FlagValues, cases: tuple[Case, ...], scratch: Path
) -> tuple[Turns, list[PeerWork]]:
    """All shapes and types one after another; scratch: a folder for one file at a time."""
    turns, works = Turns(NAMES), []
    folders = {folder.resolve().name: folder for folder in map(folder_of, flags["shapes"])}
    threads = flags["num_threads"] or len(os.sched_getaffinity(0))
    total = len(folders) * len(flags["types"]) * flags["turns"]
    with Progress(total, unit="turn", label="measuring") as progress:
        for shape, folder in folders.items():
            for kind in flags["types"]:
                file = scratch / "peer.gguf"
                write_gguf(file, read_spec(folder)[0], kind)
                work = PeerWork(f"{shape}, {kind}", file, cases, threads, flags["batched_bench"])
                works.append(work)
                with contextlib.suppress(NoneLeftError):  # the others go on, and main() says it
                    take_turns(turns, work.theirs, work.ours, flags["turns"], progress.on_finished)
                file.unlink()
    return turns, works


@command()
def main(words: Sequence[str], signals: Signals) -> int:
    """The command line; returns the exit code."""
    flags, cases = parse(words)
    with tempfile.TemporaryDirectory(prefix="regatta-") as scratch:
        turns, works = measure(flags, cases, Path(scratch))
    if turns.samples:
        show(table(changes_of(turns, 0.0), NAMES))
    buffers = {work.name: sorted(work.buffers) for work in works if work.buffers}
    dead = {case: how for work in works for case, how in work.dead.items()}
    for name, kinds in buffers.items():
        say(f"{name}: llama.cpp has its weights in {', '.join(kinds)}")
    for case, how in dead.items():
        say(f"note: {case} is not measured, llama.cpp died: {how}")
    if flags["turns"] < LEAST_TURNS:
        say(f"note: intervals take {LEAST_TURNS} turns or more")
    if flags["output_file"] is not None:
        version = run_program([flags["batched_bench"], "--version"], None, os.environ)
        said = (version.stdout or version.stderr).strip()
        versions = {**own_versions(), NAMES[0]: said or "unknown"}
        settings = {name: v for name, v in flags.values.items() if name != "output_file"}
        suites = turns.suites(command_line(PROG, words))
        suites[NAMES[0]] |= {"buffers": buffers, "died": dead}
        Outputs(flags["output_file"]).write(record(cpu_device(), versions, settings, suites))
    return 0 if turns.samples else EXIT_FAILURE


if __name__ == "__main__":
    sys.exit(main())
