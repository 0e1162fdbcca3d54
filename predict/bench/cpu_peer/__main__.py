"""llama.cpp beside Regatta on this CPU, in turns: `python -m predict.bench.cpu_peer --help`.

Both sides have the same network, as many threads, and weights in as many bits; each runs in a
process of its own, and they take turns. Weights and prompts are random. What is printed is ours,
llama.cpp's and the ratio of every turn, then medians and the interval that the ratio lies in.
--output_file writes a file from which benchmarks/make_tables.py makes the tables of CPUs. Needs
llama-cpp-python and gguf: pip install -e '.[bench]'.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.bench.cases import UNITS, Case, parse_cases
from predict.bench.cpu_peer.gguf_file import write_gguf
from predict.bench.cpu_peer.kinds import HEAD, NONE, QUANTIZED, Kind
from predict.bench.cpu_peer.others import Others
from predict.bench.cpu_peer.shapes import check_peer_has, experts_of, folder_of, sizes_of
from predict.bench.cpu_peer.sides import Program, Side, started
from predict.bench.cpu_peer.turns import (
    OURS,
    PEER,
    Beside,
    experts_line,
    most_others,
    ratio_rows,
    side_rows,
    table,
    take_turns,
    turn_line,
)
from predict.bench.report import write_json
from predict.bench.spread import least_turns
from predict.cli.command import run_command
from predict.cli.flags import Flag, FlagValues, parse_flags
from predict.errors import UserError
from predict.system.console import say, show
from predict.system.outputs import check_output
from predict.system.progress import Progress
from predict.system.signals import Signals

if TYPE_CHECKING:
    from predict.nn.spec import DecoderSpec

PROG = "python -m predict.bench.cpu_peer"
GROUP = "Both sides"
CONFIDENCE = 0.95
BUSY = 0.15  # processors of others from which on a ratio is worth nothing
# fmt: off
FLAGS = (
    Flag(GROUP, "shapes", "strs", ["qwen2.5-0.5b"],
         "Networks: names of folders in examples/shapes, or folders with a config.json."),
    Flag(GROUP, "cases", "strs", ["1x128x65", "8x128x65", "1x512x1"],
         "Sizes REQUESTSxINPUTxOUTPUT, as of predict.bench.throughput."),
    Flag(GROUP, "quant_types", "strs", ["none"],
         "Weights of the layers, one after another: none (in --dtype), weight_only_int8 or a8w8 "
         "beside Q8_0, weight_only_int4 beside Q4_0; with groups as in weight_only_int4_g64."),
    Flag(GROUP, "lm_head_quant_type", "str", HEAD,
         "LM head beside quantized layers; none: in --dtype.",
         choices=(NONE, *QUANTIZED)),
    Flag(GROUP, "dtype", "str", "bfloat16",
         "Type of weights that are not quantized, and of ours' activations.",
         choices=("float32", "bfloat16", "float16")),
    Flag(GROUP, "turns", "int", 7,
         "Turns of both sides for each case."),
    Flag(GROUP, "num_threads", "int", None,
         "Threads of each side; when not given, the processors that this process may use."),
    Flag(GROUP, "output_file", "str", None,
         "Write device, versions and every turn as JSON."),
)
# fmt: on
METHOD = (
    "Both sides in turns, each in a process of its own that waits meanwhile; the one that begins "
    "changes with every turn. Random weights and token ids, greedy, as many threads on both sides. "
    "llama.cpp has flash attention, weights in memory (no mmap), and a cache of as many bits. "
    "TTFT: of one batch of one token each (of ours the median over its requests). TPOT: (time of N "
    "tokens - time of one) / (N - 1). measured_bandwidth_gbs: reading as many bytes over and over, "
    "mean of before and after each turn. processors_of_others: what other processes and the host "
    "took meanwhile."
)
RATIO_METHOD = (
    "Times as good: llama.cpp's time over ours, our rate over llama.cpp's, of each turn. Values "
    "are medians of the turns' ratios, not ratios of the medians; intervals are those of the sign "
    f"test at {CONFIDENCE:.0%}."
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    shapes: tuple[str, ...]
    cases: tuple[Case, ...]
    kinds: tuple[Kind, ...]
    num_turns: int
    num_threads: int

    @property
    def batch_size(self) -> int:
        """Of our engine: all requests of a case run at once."""
        return max(case.num_requests for case in self.cases)

    def settings(self, folder: Path, kind: Kind) -> dict[str, Any]:
        """Of our engine, as fields of EngineConfig."""
        return {
            "model_name_or_path": str(folder.resolve()),
            "load_format": "dummy",
            "device": "cpu",
            "inference_model": True,
            "attention": "append",
            "batch_size": self.batch_size,
            "src_length": max(case.input_len for case in self.cases),
            "max_length": max(case.input_len + case.output_len for case in self.cases),
            **kind.settings,
        }


def parse(argv: Sequence[str]) -> tuple[FlagValues, Plan]:
    """The flags and the plan of a command line. Raises UserError for what cannot be measured."""
    flags = parse_flags(argv, FLAGS, PROG, __doc__ or "", "[--flag [VALUE] ...]")
    head = flags["lm_head_quant_type"]
    head = None if head == "none" else head
    names = flags["quant_types"]
    plan = Plan(
        shapes=tuple(flags["shapes"]),
        cases=parse_cases(flags["cases"]),
        kinds=tuple(Kind.parse(name, flags["dtype"], head) for name in names),
        num_turns=flags["turns"],
        num_threads=flags["num_threads"] or len(os.sched_getaffinity(0)),
    )
    for name, held in (("shapes", plan.shapes), ("cases", plan.cases), ("quant_types", names)):
        if not held:
            raise UserError(f"--{name} is empty; give it at least one")
        if len(set(held)) < len(held):
            raise UserError(f"--{name} has one twice; leave one of them out")
    for name, value in (("turns", plan.num_turns), ("num_threads", plan.num_threads)):
        if not 1 <= value <= 100:
            raise UserError(f"--{name} {value} is not supported (allowed: 1 to 100)")
    if flags["output_file"] is not None:
        check_output("output_file", flags["output_file"])
    return flags, plan


def check_packages() -> None:
    """Raises ModuleNotFoundError without the peer's packages; before anything is made."""
    import gguf  # noqa: F401
    import llama_cpp  # noqa: F401


def measure_kind(
    plan: Plan,
    shape: str,
    folder: Path,
    spec: DecoderSpec,
    kind: Kind,
    scratch: Path,
    progress: Progress,
) -> tuple[list[Beside], dict[str, Any]]:
    """All cases of one network and one kind of weights, and what both sides said of themselves.

    Raises UserError where a side fails, and where the two networks are not of one size.
    """
    file = scratch / "peer.gguf"
    write_gguf(file, spec, kind.gguf_type, kind.gguf_head_type, kind.gguf_dense_type)
    programs = (
        Program("Regatta's side", ("-m", "predict.bench.cpu_peer.ours")),
        Program("llama.cpp's side", ("-m", "predict.bench.cpu_peer.llama_cpp_side")),
    )
    with started(*programs, num_threads=plan.num_threads) as (ours, peer):
        wanted = {"settings": plan.settings(folder, kind), "num_threads": plan.num_threads}
        loaded = ours.ask(wanted)
        said = _load_peer(peer, file, plan, kind)
        file.unlink()
        if loaded["num_parameters"] != said["num_parameters"]:
            raise UserError(
                f"{shape} has {loaded['num_parameters']:,} weights here and "
                f"{said['num_parameters']:,} in llama.cpp: they would not do the same work",
                1,
            )
        cases = [Beside(shape, kind, case, sizes_of(spec)) for case in plan.cases]
        if (experts := experts_of(spec)) is not None:
            router = experts.router
            sizes = {"num_experts": router.num_experts, "top_k": router.top_k}
            for beside in cases:
                question = {"experts_of": str(beside.case), **sizes}
                beside.experts = {OURS: ours.ask(question), PEER: peer.ask(question)}
                say(experts_line(beside))

        def on_turn(beside: Beside, turn: int) -> None:
            progress.on_finished()
            say(turn_line(beside, turn, plan.num_turns))

        others = Others((ours.pid, peer.pid))
        take_turns(cases, ours.ask, peer.ask, plan.num_turns, loaded, on_turn, others.taken)
    return cases, {OURS: loaded, PEER: said}


def _load_peer(peer: Side, file: Path, plan: Plan, kind: Kind) -> dict[str, Any]:
    return peer.ask(
        {
            "file": str(file),
            "num_threads": plan.num_threads,
            "cache_type": kind.gguf_cache_type,
        }
    )


def run(plan: Plan, scratch: Path) -> tuple[list[Beside], dict[str, Any]]:
    """Measures everything; scratch: a folder, for the file of one network."""
    from predict.loading.model import read_spec

    folders = [folder_of(shape) for shape in plan.shapes]
    networks = [(folder.resolve().name, folder) for folder in folders]
    if len(dict(networks)) < len(networks):
        raise UserError("--shapes has two folders of one name; rename one, or measure it apart")
    specs = {shape: read_spec(folder)[0] for shape, folder in networks}
    for shape, spec in specs.items():
        check_peer_has(spec, shape)
    found: list[Beside] = []
    said: dict[str, Any] = {}
    total = len(networks) * len(plan.kinds) * len(plan.cases) * plan.num_turns
    with Progress(total, unit="turn", label="measuring") as progress:
        for shape, folder in networks:
            for kind in plan.kinds:
                cases, said = measure_kind(
                    plan, shape, folder, specs[shape], kind, scratch, progress
                )
                found += cases
    return found, said


def results(
    cases: Sequence[Beside], said: dict[str, Any], flags: FlagValues, command: str
) -> dict[str, Any]:
    """The file: ours, the peer's, and the ratios, each a suite."""
    from predict.bench.record import record, suite

    versions = {**said[OURS]["versions"], PEER: said[PEER]["version"]}
    settings = {name: value for name, value in flags.values.items() if name != "output_file"}
    made = {
        OURS: suite(side_rows(cases, OURS), UNITS, command, METHOD),
        PEER: {
            "engine": PEER,
            "features": said[PEER]["features"],
            **suite(side_rows(cases, PEER), UNITS, command, METHOD),
        },
        "ratios": suite(ratio_rows(cases, CONFIDENCE), {}, command, RATIO_METHOD),
    }
    return record(said[OURS]["device"], versions, settings, made)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""

    def action(signals: Signals) -> int:
        from predict.bench.record import command_line

        words = sys.argv[1:] if argv is None else argv
        flags, plan = parse(words)
        check_packages()
        with tempfile.TemporaryDirectory(prefix="regatta-") as scratch:
            cases, said = run(plan, Path(scratch))
        show(table(cases, CONFIDENCE))
        if plan.num_turns < least_turns(CONFIDENCE):
            say(f"note: {CONFIDENCE:.0%} intervals take {least_turns(CONFIDENCE)} turns or more")
        if (busy := most_others(cases)) > BUSY:
            say(
                f"note: other processes took up to {busy:.1f} processors beside a turn, which "
                "costs the two sides unlike shares: these ratios say nothing; measure again on a "
                "machine that is idle"
            )
        for beside in cases:
            if beside.lacks_ratio:
                say(f"note: {beside.name} is too short for a TPOT here; give it more output tokens")
        if flags["output_file"] is not None:
            made = results(cases, said, flags, command_line(PROG, words))
            write_json(made, flags["output_file"])
        return 0

    return run_command(action)


if __name__ == "__main__":
    sys.exit(main())
