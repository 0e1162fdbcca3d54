"""Makes the tables and plots of the documentation from the numbers in benchmarks/.

    python benchmarks/make_tables.py          # writes the tables into docs/ and README.md
    python benchmarks/make_tables.py --check  # leaves with 1 where a table is not current
    python benchmarks/make_tables.py --plots  # writes docs/images/*.png too; needs matplotlib
    python benchmarks/make_tables.py --turns FILE  # prints what a file of cpu_peer would make

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`. benchmarks/README.md says what
the files of numbers hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
IMAGES = ROOT / "docs" / "images"
MARKED = re.compile(
    r"^<!-- table: (?P<name>[\w-]+) -->\n.*?^<!-- /table -->$", re.MULTILINE | re.DOTALL
)

Row = dict[str, Any]
Number = int | Decimal  # as the file writes it, with all its digits
Show = Callable[[Number], str]


@cache
def _file(name: str | Path) -> dict[str, Any]:
    text = (HERE / name).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return content


def rows(suite: str, *names: str | Path) -> dict[str, Row]:
    """The rows of a suite by name, from all files that have it."""
    found: dict[str, Row] = {}
    for name in names:
        for row in _file(name)["suites"][suite]["rows"]:
            if row["name"] in found:
                raise ValueError(f"{name}: {suite} has {row['name']!r} twice")
            found[row["name"]] = row
    return found


def plain(value: Number) -> str:
    """As the file has it, with commas between thousands."""
    return f"{value:,}"


def percent(value: Number) -> str:
    """A share."""
    return f"{value:.0%}".replace("%", " %")


def times(value: Number) -> str:
    """A ratio."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def pivot(found: dict[str, Row], columns: Sequence[str], show: Show, first: str = "") -> str:
    """A table with a line per row and the values of `columns`."""
    body = []
    for name, row in found.items():
        values = row["values"]
        body.append([name, *(show(values[c]) if c in values else "" for c in columns)])
    return markdown([first, *columns], body)


H200 = ("h200/2026-11-22.json", "h200/2026-11-23.json")
H200_SERVED = "h200/2026-11-24.json"
H200_SHAPES = "h200/2026-11-25.json"
# Of benchmarks/add_runs.py. Cases of a later file take the place of an earlier one's.
H200_RUNS = ("h200/2026-11-26.json", "h200/2026-11-27.json")
ZEN4_ADAPTERS = "zen4/2026-11-27-adapters.json"  # of benchmarks/turns.py
H100_EXPERTS = "h100/2026-11-25.json"
VLLM = "peers/vllm-0.26-h200.json"
ZEN5, ZEN4, QUALITY = "zen5/2026-11-21.json", "zen4/2026-11-23.json", "quality/2026-11-21.json"
LLAMA = {ZEN5: "peers/llama-cpp-0.3.36-zen5.json", ZEN4: "peers/llama-cpp-0.3.36-zen4.json"}
QUANTIZED_ORDER = (
    "none",
    "weight_only_int8",
    "weight_only_int4, groups of 128",
    "a8w8",
    "w4a8, groups of 128",
    "a8w8_fp8",
)
BATCHES = ("1", "8", "32", "64", "128", "256")
PROMPTS = ("512 tokens", "1,024 tokens", "8,000 tokens")


MODEL_NAMES = {
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "mixtral-8x7b": "Mixtral-8x7B",
    "deepseek-v2-lite": "DeepSeek-V2-Lite",
}


class Run(NamedTuple):
    """One case of a run that benchmarks/add_runs.py added."""

    name: str  # of the run
    case: str  # REQUESTSxINPUTxOUTPUT
    settings: dict[str, Any]
    row: Row

    @property
    def ms(self) -> Decimal:
        """Per token, or of prompts alone to the first."""
        values = self.row["values"]
        return Decimal(values.get("tpot_ms", values["ttft_ms"]))


def runs(suite: str) -> Iterator[Run]:
    """The rows of a suite's runs, what is newer behind what is older."""
    found: dict[tuple[str, str], Run] = {}
    for file in H200_RUNS:
        held = _file(file)["suites"].get(suite, {"rows": ()})
        for row in held["rows"]:
            name, case = row["run"], row["case"]
            found.pop((name, case), None)
            found[name, case] = Run(name, case, held["runs"][name]["settings"], row)
    yield from found.values()


def milliseconds(value: Number) -> str:
    """No more digits than repeat."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def speed_up(ours: Number, peer: Number, unit: str) -> Number:
    """How many times as fast ours is; times are better when small, rates when large."""
    return Decimal(ours) / peer if unit.endswith("/s") else Decimal(peer) / ours


def h200_bfloat16() -> str:
    """Dynamic and static mode beside vLLM."""
    peers = rows("bfloat16", VLLM)
    body = []
    for name, row in rows("bfloat16", H200[0]).items():
        values, unit = row["values"], row["unit"]
        peer = peers[name]["values"]["value"]
        share = values.get("share_of_limit")
        limit = "" if share is None else f"{percent(share)} of {row['limit']}"
        static = plain(values["static"]) if "static" in values else ""
        ratio = times(speed_up(values["dynamic"], peer, unit))
        body.append(
            [f"{name}, {unit}", plain(values["dynamic"]), static, plain(peer), ratio, limit]
        )
    head = ["", "dynamic", "static", "vLLM 0.26", "times as fast", "share of the GPU's limit"]
    return markdown(head, body)


def quantized_merged() -> dict[str, dict[str, Number]]:
    """Of each type of weights the values by column; of two files' the later."""
    merged: dict[str, dict[str, Number]] = {}
    for file in H200:
        for name, row in rows("quantized", file).items():
            merged.setdefault(name, {}).update(row["values"])
    return merged


def h200_quantized() -> str:
    """Every type of weights, by batch and by prompt."""
    merged = quantized_merged()
    found = {name: {"values": merged[name]} for name in QUANTIZED_ORDER} | rows("quantized", VLLM)
    return pivot(found, (*BATCHES, *PROMPTS), plain, "`--quant_type`")


def h200_again() -> str:
    """Some of them once more, beside what the table of all has."""
    cases = {
        **{f"{n}x128x129": n for n in BATCHES},
        "1x1024x1": "1,024 tokens",
        "1x8000x1": "8,000 tokens",
    }
    # As the table of all calls them; one scale of a row is stored like one of each group.
    names = {"none": "none", "weight_only_int4": "weight_only_int4, groups of 128"}
    merged = quantized_merged()
    cells: dict[str, dict[str, str]] = {}
    for run in runs("quantized"):
        kind, column = run.settings["quant_type"], cases[run.case]
        before = merged[names.get(kind, kind)].get(column)
        beside = "" if before is None else f" ({plain(before)})"
        cells.setdefault(kind, {})[column] = milliseconds(run.ms) + beside
    columns = [c for c in cases.values() if any(c in line for line in cells.values())]
    body = [[kind, *(line.get(c, "") for c in columns)] for kind, line in cells.items()]
    return markdown(["`--quant_type`", *columns], body)


def h200_prompts() -> str:
    """Time to the first token by length."""
    found = rows("prompts", H200[1])
    lengths = next(iter(found.values()))["values"]
    body = [[n, *(plain(row["values"][n]) for row in found.values())] for n in lengths]
    return markdown(["tokens", *found], body)


def h200_drafts() -> str:
    """With and without drafts."""
    columns: dict[str, tuple[str, Show]] = {
        "copy_without": ("copy, tokens/s without", plain),
        "copy_with": ("with", plain),
        "copy_speed_up": ("times as fast", times),
        "accepted_per_step": ("accepted drafts per step", plain),
        "random_speed_up": ("random, times as fast", times),
    }
    body = []
    for name, row in rows("drafts", H200[0]).items():
        body.append([name, *(show(row["values"][c]) for c, (_, show) in columns.items())])
    return markdown(["", *(label for label, _ in columns.values())], body)


def h200_batch_invariant() -> str:
    """What one order of sums costs."""
    columns = ("1", "8", "32", "128", "1,024 tokens", "8,000 tokens")
    return pivot(rows("batch_invariant", H200[0]), columns, plain, "ms")


def h200_attention() -> str:
    """Decode attention by cache format."""
    columns = ("bfloat16", "fp8", "int8 per token", "int4")
    return pivot(rows("decode_attention", H200[0]), columns, percent, "requests x tokens")


def h200_long_contexts() -> str:
    """Long contexts beside vLLM, by cache; what was not measured again is of the older record."""
    cases = {
        "decode, 8 x 32,000": "8x32000x257",
        "prompt of 32,000 tokens": "1x32000x1",
        "prompt of 100,000 tokens": "1x100000x1",
    }
    caches = {"dense": "bfloat16", "int8_dynamic": "int8 per token", "fp8": "fp8"}
    found = {(run.case, run.settings["kv_format"]): run.ms for run in runs("long_contexts")}
    peers = rows("long_contexts", VLLM)
    body = []
    for name, row in rows("long_contexts", H200[1]).items():
        peer, case = peers[name]["values"]["value"], cases.get(name, "")
        ours = [found.get((case, cache)) for cache in caches]
        file = H200[1] if ours[0] is None else H200_RUNS[0]
        first = row["values"]["dynamic"] if ours[0] is None else ours[0]
        shown = ["" if value is None else milliseconds(value) for value in (first, *ours[1:])]
        ratio = times(speed_up(first, peer, row["unit"]))
        body.append([f"{name}, {row['unit']}", *shown, plain(peer), ratio, Path(file).stem])
    head = [*(f"{cache} cache" for cache in caches.values()), "vLLM 0.26, bfloat16"]
    return markdown(["", *head, "times as fast, bfloat16", "measured"], body)


def by_model_and_size(run: Run) -> tuple[str, str, int, int, str]:
    """Decoding first, by batch, then prompts by length."""
    requests, length, tokens = map(int, run.case.split("x"))
    place = requests if tokens > 1 else length * 1_000
    model = Path(run.settings["model"]).name
    return MODEL_NAMES[model], run.settings["quant_type"], place, length, run.case


EXPERT_PROMPTS = {"1x1024x1": "1,024 tokens", "1x8000x1": "8,000 tokens"}


def expert_rows(suite: str) -> list[tuple[str, str, str, Run]]:
    """Of models with experts: the model, its work, the peers' column of it, and its newest run."""
    found = []
    for _, run in sorted({by_model_and_size(run): run for run in runs(suite)}.items()):
        model, kind = MODEL_NAMES[Path(run.settings["model"]).name], run.settings["quant_type"]
        name = model if kind == "none" else f"{model}, {KIND_NAMES[kind]}"
        batch, length, tokens = run.case.split("x")
        column = EXPERT_PROMPTS.get(run.case, batch)
        work = f"prompt of {column}" if run.case in EXPERT_PROMPTS else f"decode, batch {batch}"
        if length == "8000" and run.case not in EXPERT_PROMPTS:
            work, column = f"decode, {batch} x 8,000, {tokens} out", ""
        found.append((name, work, column, run))
    return found


def chosen_experts(run: Run) -> str:
    """Distinct ones, of a layer and step, where they were counted."""
    name = "prompt_experts" if run.case in EXPERT_PROMPTS else "decode_experts"
    experts = run.row["values"].get(name)
    return "" if experts is None else f"{experts:.1f}"


def h200_experts() -> str:
    """Models with experts beside vLLM."""
    peers = rows("experts", VLLM)
    body = []
    for name, work, column, run in expert_rows("experts"):
        values = peers[name]["values"] if name in peers else {}
        peer, found = values.get(column), run.row["values"]
        share = "share_of_limit" if run.case in EXPERT_PROMPTS else "decode_bandwidth_share"
        body.append(
            [
                f"{name}, {work}",
                milliseconds(run.ms),
                "" if peer is None else plain(peer),
                "" if peer is None else times(Decimal(peer) / run.ms),
                percent(found[share]) if share in found else "",
                chosen_experts(run),
            ]
        )
    head = ["ms", "Regatta", "vLLM 0.26", "times as fast", "share of the limit", "experts"]
    return markdown(head, body)


def h200_skewed() -> str:
    """Models with experts whose routers choose some far more often than others."""
    uniform = {(name, work): run for name, work, _, run in expert_rows("experts")}
    body = []
    for name, work, _, run in expert_rows("experts_skewed"):
        other = uniform[name, work]
        ours = [milliseconds(run.ms), chosen_experts(run)]
        body.append([f"{name}, {work}", milliseconds(other.ms), chosen_experts(other), *ours])
    head = ["", "uniform, ms", "experts", "skewed, ms", "experts"]
    return markdown(head, body)


def h200_adapters() -> str:
    """What adapters of requests cost; a cell is empty until its run is in the suite."""
    columns = {
        "base": "none",
        "lora": "eight, in turn",
        "none_beside_idle": "none, another GPU",
        "idle": "eight, not named",
    }
    cases = {f"{n}x128x129": n for n in ("1", "8", "32", "128")} | {"1x1024x1": "1,024 tokens"}
    found = {(run.name, run.case): milliseconds(run.ms) for run in runs("adapters")}
    ((_, peer),) = rows("adapters", VLLM).items()
    body = []
    for case, column in cases.items():
        work = f"prompt of {column}" if case == "1x1024x1" else f"decode, batch {column}"
        ours = (found.get((name, case), "") for name in columns)
        body.append([work, *ours, plain(peer["values"][column])])
    return markdown(["ms", *columns.values(), "vLLM 0.26, eight in turn"], body)


def cpu_adapters() -> str:
    """What adapters of requests cost on a CPU."""
    body = []
    for name, row in rows("adapters", ZEN4_ADAPTERS).items():
        shape, kind, case = name.split(", ")
        values, (low, high) = row["values"], row["interval"]
        model, weights = SHAPE_NAMES.get(shape, shape), KIND_NAMES.get(kind, DTYPE)
        body.append(
            [
                f"{model}, {weights}, batch {case.split('x')[0]}",
                milliseconds(values["before_ms"]),
                milliseconds(values["after_ms"]),
                f"{times(values['ratio'])} ({times(low)} to {times(high)})",
            ]
        )
    return markdown(["ms per token of the batch", "none", "eight, in turn", "ratio"], body)


def h200_guided() -> str:
    """What guides cost."""
    head = ["Llama-3-8B, batch 32", "tokens/s", "with over without", "masks of a step, ms"]
    body = []
    for name, row in rows("guided", H200_SERVED).items():
        values = row["values"]
        guided = "times_as_fast" in values
        body.append(
            [
                name,
                plain(values["tokens_per_s"]),
                times(values["times_as_fast"]) if guided else "",
                plain(values["mask_ms_per_step"]) if guided else "",
            ]
        )
    return markdown(head, body)


def h200_served() -> str:
    """Requests over HTTP beside the same offline."""
    columns = {
        "output_tokens_per_s": "output tokens/s",
        "share_of_offline": "share of offline",
        "ttft_p50_ms": "TTFT P50, ms",
        "ttft_p99_ms": "TTFT P99, ms",
        "itl_p50_ms": "ITL P50, ms",
        "itl_p99_ms": "ITL P99, ms",
    }
    body = [
        [name, *(plain(row["values"][c]) if c in row["values"] else "" for c in columns)]
        for name, row in rows("served", H200_SERVED).items()
    ]
    return markdown(["Llama-3-8B, 512 in, 256 out", *columns.values()], body)


def h200_shapes() -> str:
    """Families of other forms beside Llama."""
    columns = {
        "1x128x65": "decode, batch 1",
        "32x128x257": "decode, batch 32",
        "1x1024x1": "prompt of 1,024 tokens",
    }
    shapes: dict[str, dict[str, str]] = {}
    for row in rows("shapes", H200_SHAPES).values():
        ms, share = row["values"]["ms"], row["values"]["share_of_limit"]
        shapes.setdefault(row["shape"], {})[row["case"]] = f"{plain(ms)} ({percent(share)})"
    body = [[name, *(cells[case] for case in columns)] for name, cells in shapes.items()]
    return markdown(["bfloat16, ms (share of the limit)", *columns.values()], body)


def h200_loading() -> str:
    """How long a model takes to be ready."""
    found = rows("loading", H200_SHAPES)
    body = [
        [name, plain(row["values"]["ready_s"]), plain(row["values"]["memory_mib"])]
        for name, row in found.items()
    ]
    return markdown(["`--quant_type`", "ready, s", "MiB on the GPU"], body)


def h100() -> str:
    """The same sizes on an H100."""
    columns = ("1", "8", "32", "128", "1,024 tokens", "8,000 tokens")
    found = rows("quantized", "h100/2026-11-23.json")
    return pivot(found, columns, plain, "`--quant_type`")


def h100_experts() -> str:
    """A model with experts on an H100."""
    found = rows("experts", H100_EXPERTS)
    body = [
        [row["case"], plain(row["values"]["ms"]), percent(row["values"]["share_of_limit"])]
        for row in found.values()
    ]
    return markdown(["Qwen3-30B-A3B", "ms", "share of the limit"], body)


def h100_groups() -> str:
    """The products of its experts."""
    found = rows("groups", H100_EXPERTS)
    body = [
        [name, plain(row["values"]["us"]), plain(row["values"]["tbs"])]
        for name, row in found.items()
    ]
    return markdown(["experts of Qwen3-30B-A3B", "us", "TB/s of weights"], body)


class Beside(NamedTuple):
    """One case of ours beside llama.cpp's, in tokens/s."""

    shape: str
    work: str  # "decode, batch 8", "prompt of 512"
    kind: str  # of weights: "none", "int8", "int4 g32"
    ours: str
    peer: str
    ratio: Decimal
    shown_ratio: str
    interval: str = ""  # of the ratio; "" where the record has none

    @property
    def name(self) -> str:
        """Of the case, whatever its weights."""
        return f"{self.shape}, {self.work}"

    @property
    def ratio_text(self) -> str:
        """The ratio, and between what it lies."""
        return self.shown_ratio + (f" ({self.interval})" if self.interval else "")


# Shapes and kinds of predict.bench.cpu_peer as the tables call them.
SHAPE_NAMES = {
    "qwen2.5-0.5b": "Qwen2.5-0.5B shape",
    "gemma-3-1b": "Gemma-3-1B shape",
    "llama-3.2-1b": "Llama-3.2-1B shape",
    "experts-8-top-2": "8 experts, 2 chosen",
    "experts-64-top-6": "64 experts, 6 chosen",
}
DTYPE = "bfloat16"  # of weights that are not quantized
KIND_NAMES = {"weight_only_int8": "int8", "weight_only_int4": "int4", "a8w8_fp8": "fp8"}


def latest_turns(device: str, of: str = "") -> str | Path | None:
    """The latest file of a device that predict.bench.cpu_peer wrote; None before the first.

    of: what stands in its name behind the date.
    """
    files = sorted((HERE / device).glob(f"????-??-??{of}.json"), reverse=True)
    return next((f for f in files if {"regatta", "ratios"} <= set(_file(f)["suites"])), None)


def read_turns(file: str | Path) -> list[Beside]:
    """What predict.bench.cpu_peer wrote: medians, and the ratio's interval."""
    ours, peers, ratios = (rows(suite, file) for suite in ("regatta", "llama.cpp", "ratios"))
    found = []
    for name, row in ours.items():
        shape, kind, case = name.rsplit(", ", 2)
        requests, length, _ = (int(size) for size in case.split("x"))
        ((metric, _),) = row["cases"].items()
        decodes = metric == "tpot_ms"
        tokens = requests if decodes else requests * length
        base, _, group = kind.partition("_g")

        def shown(side: Row, metric: str = metric, tokens: int = tokens) -> str:
            rate = 1000 * tokens / Decimal(side["values"][metric])
            bandwidth = side["values"]["measured_bandwidth_gbs"]
            beside = f" ({bandwidth:.0f} GB/s)" if metric == "tpot_ms" else ""
            return f"{rate:,.0f}{beside}" if rate >= 1000 else f"{rate:.1f}{beside}"

        column = f"{metric}_times_as_good"
        if column not in ratios[name]["values"]:  # too short for a TPOT on that machine
            continue
        low_high = ratios[name].get("intervals", {}).get(column)
        batch = f", {requests} requests" if requests > 1 else ""
        found.append(
            Beside(
                shape=SHAPE_NAMES.get(shape, shape),
                work=f"decode, batch {requests}" if decodes else f"prompt of {length}{batch}",
                kind=KIND_NAMES.get(base, base) + (f" g{group}" if group else ""),
                ours=shown(row),
                peer=shown(peers[name]),
                ratio=Decimal(ratios[name]["values"][column]),
                shown_ratio=times(ratios[name]["values"][column]),
                interval=" to ".join(times(each) for each in low_high) if low_high else "",
            )
        )
    return found


def zen5_bfloat16() -> list[Beside]:
    """bfloat16 on the Zen 5 host: the latest turns, or the older record."""
    turns = latest_turns("zen5")
    if turns is not None:
        return [each for each in read_turns(turns) if each.kind == "none"]

    def shown(row: Row, key: str) -> str:
        beside = row.get("bandwidth_gbs")
        return plain(row["values"][key]) + (f" ({beside} GB/s)" if beside else "")

    peers = rows("bfloat16", LLAMA[ZEN5])
    found = []
    for name, row in rows("bfloat16", ZEN5).items():
        shape, _, work = name.partition(", ")
        ratio = Decimal(row["values"]["regatta"]) / peers[name]["values"]["value"]
        ours, peer = shown(row, "regatta"), shown(peers[name], "value")
        found.append(Beside(shape, work, "none", ours, peer, ratio, times(ratio)))
    return found


def zen4_quantized() -> list[Beside]:
    """Quantized weights on the Zen 4 host, with a vocabulary of 32,000."""
    peers = rows("quantized", LLAMA[ZEN4])
    kinds = {"int8": "Q8_0", "int4 g128": "Q4_0", "int4 g64": "Q4_0", "int4 g32": "Q4_0"}
    found = []
    for name, row in rows("quantized", ZEN4).items():
        shape, _, work = name.partition(", ")
        for kind, of in kinds.items():
            ours, peer = plain(row["values"][kind]), plain(peers[name]["values"][of])
            ratio = Decimal(row["ratios"][kind])
            found.append(Beside(shape, work, kind, ours, peer, ratio, plain(ratio)))
    return found


def beside_table(found: Sequence[Beside]) -> str:
    """A line per case of one kind of weights."""
    body = [[each.name, each.ours, each.peer, each.ratio_text] for each in found]
    return markdown(["tokens/s", "Regatta", "llama.cpp", "times as fast"], body)


def kinds_table(found: Sequence[Beside]) -> str:
    """A line per case, a column per kind of weights."""
    kinds = list(dict.fromkeys(each.kind for each in found))
    cells = {(each.name, each.kind): each for each in found}
    body = []
    for name in dict.fromkeys(each.name for each in found):
        line = [name]
        for kind in kinds:
            cell = cells.get((name, kind))
            if cell is None:
                line.append("")
                continue
            ours, peer = (side.partition(" (")[0] for side in (cell.ours, cell.peer))
            line.append(f"{ours} / {peer} ({cell.shown_ratio})")
        body.append(line)
    return markdown(["tokens/s, ours / llama.cpp (ratio)", *kinds], body)


def cpu_bfloat16() -> str:
    """bfloat16 beside llama.cpp."""
    return beside_table(zen5_bfloat16())


def cpu_quantized() -> str:
    """int8 and int4 beside llama.cpp; ratios are medians of turns, not of the medians."""
    return kinds_table(zen4_quantized())


def zen4_turns(of: str = "") -> str:
    """The Zen 4 host's latest turns, whatever the weights."""
    turns = latest_turns("zen4", of)
    assert turns is not None
    found = read_turns(turns)
    return kinds_table([b._replace(kind="bfloat16") if b.kind == "none" else b for b in found])


def cpu_shapes() -> str:
    """Published sizes."""
    return zen4_turns()


def cpu_experts() -> str:
    """Networks with experts."""
    return zen4_turns("-experts")


def cpu_quantized_zen5() -> str:
    """Ratios on the other host."""
    turns = latest_turns("zen5")
    quantized = [] if turns is None else [b for b in read_turns(turns) if b.kind != "none"]
    if not quantized:
        columns = ["Qwen2.5-0.5B shape", "Llama-1B shape"]
        return pivot(rows("ratios_quantized", ZEN5), columns, plain, "times as fast")
    columns = list(dict.fromkeys(b.shape for b in quantized))
    ratios = {(b.kind, b.work, b.shape): b.ratio_text for b in quantized}
    lines = dict.fromkeys((b.kind, b.work) for b in quantized)
    body = [[", ".join(line), *(ratios.get((*line, c), "") for c in columns)] for line in lines]
    return markdown(["times as fast", *columns], body)


def tables_of_turns(file: Path) -> Iterator[str]:
    """What a file of predict.bench.cpu_peer would make of the tables of CPUs."""
    found = read_turns(file)
    for part, table in (
        ([each for each in found if each.kind == "none"], beside_table),
        ([each for each in found if each.kind != "none"], kinds_table),
    ):
        if part:
            yield table(part)


def cpu_backends() -> str:
    """Compiled and plain operators."""
    body = []
    for name, row in rows("backends", ZEN5).items():
        values = row["values"]
        slow = values.get("plain")
        ratio = "" if slow is None else f"{float(values['compiled'] / slow):.2g}"
        body.append([name, plain(values["compiled"]), "" if slow is None else plain(slow), ratio])
    return markdown(["tokens/s", "compiled operators", "plain Paddle", "times as fast"], body)


def cpu_operators() -> str:
    """Single operators as shares of the limit."""
    return pivot(rows("operators", ZEN5), ("1 token", "8 tokens", "512 tokens"), percent)


def quality() -> str:
    """What each scheme costs."""
    columns: dict[str, tuple[str, Show]] = {
        "perplexity": ("perplexity", plain),
        "ratio": ("ratio", plain),
        "kl": ("KL, nats", plain),
        "top1": ("same top token", lambda share: f"{share:.2%}".replace("%", " %")),
        "weights_mib": ("weights, MiB", plain),
    }
    body = []
    for name, row in rows("demo_model", QUALITY).items():
        body.append([f"`{name}`", *(show(row["values"][c]) for c, (_, show) in columns.items())])
    return markdown(["weights and cache", *(label for label, _ in columns.values())], body)


def headline_rows() -> Iterator[tuple[str, str, str, str, Number, str]]:
    """Device, case, ours, the peer's, times as fast, and the share of the device's limit."""
    peers = rows("bfloat16", VLLM)
    ours = rows("bfloat16", H200[0])
    for name in (
        "decode, batch 1",
        "decode, batch 128",
        "prompt of 1,024 tokens",
        "512 requests of 512 in, 256 out",
    ):
        row, unit = ours[name], ours[name]["unit"]
        value, peer = row["values"]["dynamic"], peers[name]["values"]["value"]
        share = row["values"].get("share_of_limit")
        limit = "" if share is None else f"{percent(share)} of {row['limit']}"
        label = f"Llama-3-8B, {name}, {unit}"
        ratio = speed_up(value, peer, unit)
        yield "H200", label, plain(value), f"{plain(peer)} (vLLM 0.26)", ratio, limit
    for each in zen5_bfloat16():
        if each.shape == "Qwen2.5-0.5B shape":
            label = f"{each.name.replace(' shape', '')}, tokens/s"
            value, peer = (side.partition(" (")[0] for side in (each.ours, each.peer))
            yield "CPU", label, value, f"{peer} (llama.cpp)", each.ratio, ""


def headline() -> str:
    """The README's table."""
    body = [
        [device, label, ours, peer, times(ratio), limit]
        for device, label, ours, peer, ratio, limit in headline_rows()
    ]
    head = ["", "bfloat16", "Regatta", "peer", "times as fast", "share of the device's limit"]
    return markdown(head, body)


def headline_zh() -> str:
    """The same for README_CN.md."""
    words = {"decode": "解码", "batch": "批大小", "prompt of": "提示词", "tokens/s": "token/s"}
    words |= {"ms per token": "毫秒/token", "ms to the first token": "首 token 毫秒"}
    words |= {" requests of 512 in, 256 out": " 条请求，输入 512，输出 256", "output ": "输出 "}
    words |= {"of bandwidth": "带宽", "of bfloat16 products": "bfloat16 算力"}
    body = []
    for device, label, ours, peer, ratio, limit in headline_rows():
        for english, chinese in words.items():
            label, limit = label.replace(english, chinese), limit.replace(english, chinese)
        body.append([device, label, ours, peer, times(ratio), limit])
    head = ["", "bfloat16", "Regatta", "对比", "速度之比", "占设备上限"]
    return markdown(head, body)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "headline-zh": headline_zh,
    "h200-bfloat16": h200_bfloat16,
    "h200-quantized": h200_quantized,
    "h200-again": h200_again,
    "h200-prompts": h200_prompts,
    "h200-drafts": h200_drafts,
    "h200-batch-invariant": h200_batch_invariant,
    "h200-attention": h200_attention,
    "h200-long-contexts": h200_long_contexts,
    "h200-experts": h200_experts,
    "h200-skewed": h200_skewed,
    "h200-adapters": h200_adapters,
    "h200-guided": h200_guided,
    "h200-served": h200_served,
    "h200-shapes": h200_shapes,
    "h200-loading": h200_loading,
    "h100": h100,
    "h100-experts": h100_experts,
    "h100-groups": h100_groups,
    "cpu-bfloat16": cpu_bfloat16,
    "cpu-quantized": cpu_quantized,
    "cpu-experts": cpu_experts,
    "cpu-shapes": cpu_shapes,
    "cpu-quantized-zen5": cpu_quantized_zen5,
    "cpu-adapters": cpu_adapters,
    "cpu-backends": cpu_backends,
    "cpu-operators": cpu_operators,
    "quality": quality,
}


def with_tables(text: str) -> str:
    """`text` with every marked table made anew. Raises KeyError for a name that is not known."""

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- table: {name} -->\n\n{TABLES[name]()}\n\n<!-- /table -->"

    return MARKED.sub(made, text)


def pages() -> list[Path]:
    """Every page that may hold a table."""
    return [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("README*.md"))]


def stale_pages() -> list[Path]:
    """Pages whose tables are not what the numbers make."""
    return [
        page for page in pages() if with_tables(text := page.read_text(encoding="utf-8")) != text
    ]


def plot_all() -> None:
    """Writes the plots; needs matplotlib."""
    import matplotlib as mpl

    mpl.use("Agg")
    IMAGES.mkdir(exist_ok=True)
    for name, draw in PLOTS.items():
        figure = draw()
        figure.tight_layout()
        figure.savefig(IMAGES / f"{name}.png", dpi=110, metadata={"Software": None})


def plot_headline() -> Any:
    """How many times as fast as the peer, case by case."""
    from matplotlib import pyplot as plt

    found = list(headline_rows())[::-1]
    figure, axes = plt.subplots(figsize=(8, 3.6))
    colors = ["#00796b" if device == "H200" else "#5c6bc0" for device, *_ in found]
    bars = axes.barh([f"{device}: {label.rpartition(', ')[0]}" for device, label, *_ in found],
                     [float(ratio) for *_, ratio, _ in found], color=colors)  # fmt: skip
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_xlabel("times as fast as vLLM 0.26 (H200), llama.cpp (CPU)")
    axes.set_xlim(0, 1.12 * float(max(ratio for *_, ratio, _ in found)))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def plot_decode() -> Any:
    """Time per token by batch, for each type of weights."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2))
    peers = {"vLLM 0.26, bfloat16": _vllm_decode()} | {
        name: row["values"] for name, row in rows("quantized", VLLM).items()
    }
    ours = quantized_merged()
    ours["bfloat16"] = ours.pop("none")
    for group, style in ((ours, "-o"), (peers, "--x")):
        for name, values in group.items():
            batches = [b for b in BATCHES if b in values]
            axes.plot(
                [int(b) for b in batches], [float(values[b]) for b in batches], style, label=name
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([int(b) for b in BATCHES], BATCHES)
    axes.set_ylim(0)
    axes.set_xlabel("batch")
    axes.set_ylabel("ms per token")
    axes.set_title("Decoding on one H200, Llama-3-8B shape", fontsize=11)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _vllm_decode() -> dict[str, Number]:
    found = rows("bfloat16", VLLM)
    values = {b: found.get(f"decode, batch {b}") for b in BATCHES}
    return {b: row["values"]["value"] for b, row in values.items() if row is not None}


def plot_quality() -> Any:
    """Perplexity against the size of the weights."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2))
    last: dict[float, float] = {}
    for name, row in sorted(
        rows("demo_model", QUALITY).items(), key=lambda item: -item[1]["values"]["perplexity"]
    ):
        if "@" in name:
            continue
        size, perplexity = (float(row["values"][key]) for key in ("weights_mib", "perplexity"))
        axes.plot(size, perplexity, "o", color="#00796b")
        crowded = last.get(size, 1e9) - perplexity < 0.005  # the label above is in the way
        axes.annotate(
            name,
            (size, perplexity),
            (6, -11 if crowded else -3),
            textcoords="offset points",
            fontsize=8,
        )
        last[size] = perplexity
    axes.set_xlabel("weights, MiB")
    axes.set_ylabel("perplexity of held-out text")
    axes.set_xlim(7, 27)
    axes.set_title("What quantization costs the demo model", fontsize=11)
    axes.grid(alpha=0.3)
    return figure


PLOTS: dict[str, Callable[[], Any]] = {
    "headline": plot_headline,
    "h200-decode": plot_decode,
    "quality": plot_quality,
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    parser.add_argument("--plots", action="store_true", help="make the plots too")
    parser.add_argument("--turns", type=Path, help="print the tables of one file of cpu_peer")
    arguments = parser.parse_args(argv)
    if arguments.turns is not None:
        print("\n\n".join(tables_of_turns(arguments.turns.resolve())))
        return 0
    stale = stale_pages()
    if arguments.check:
        for page in stale:
            print(f"{page.relative_to(ROOT)}: a table is not current", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")
    if arguments.plots:
        plot_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
