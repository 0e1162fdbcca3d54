"""Makes the tables and plots of the documentation from the numbers in benchmarks/.

    python benchmarks/make_tables.py          # writes the tables into docs/ and README.md
    python benchmarks/make_tables.py --check  # leaves with 1 where a table is not current
    python benchmarks/make_tables.py --plots  # writes docs/images/*.png too; needs matplotlib

A table stands between `<!-- table: NAME -->` and `<!-- /table -->`. TABLES says which suites of
which files a table has: rows of one name become one line, and of a number that stands in several
files the last is shown. benchmarks/README.md says what the files hold.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
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

Number = int | Decimal  # as the file writes it, with all its digits
Show = Callable[[Number], str]


class Source(NamedTuple):
    """A suite of a file. keys: column of the file -> column of the table, the later ones first."""

    file: str
    suite: str
    keys: Mapping[str, str] = {}
    prefix: str = ""  # of names
    only: str = ""  # a regular expression of the names that are taken


class Table(NamedTuple):
    """A pivot of suites. columns: of the table, and how each shows its numbers."""

    sources: Sequence[Source]
    columns: Mapping[str, Show]
    first: str = ""  # head of the first column
    ratio: tuple[str, str] | None = None  # columns of ours and a peer's, for "times as fast"
    is_grid: bool = False  # names are LINE, COLUMN, and a cell is the row's milliseconds
    is_closed: bool = False  # lines are those of the first source
    in_order: bool = False  # lines in the order of their names
    words: Mapping[str, str] = {}  # replaced in the whole table

    def lines(self) -> dict[str, dict[str, Any]]:
        """Line -> column -> number; "limit" and "intervals" beside them."""
        found: dict[str, dict[str, Any]] = {}
        for source in self.sources:
            for row in _file(source.file)["suites"][source.suite]["rows"]:
                name = source.prefix + row["name"]
                if not re.search(source.only, name):
                    continue
                column = ""
                if self.is_grid:
                    name, _, column = name.rpartition(", ")
                if self.is_closed and name not in found and source is not self.sources[0]:
                    continue
                line = found.setdefault(name, {"intervals": {}})
                for key, value in row["values"].items():
                    if not self.is_grid or key in ("ms", "ttft_ms", "tpot_ms"):
                        line[column or source.keys.get(key, key)] = value
                for key, interval in row.get("intervals", {}).items():
                    line["intervals"][source.keys.get(key, key)] = interval
                line |= {key: row[key] for key in ("limit", "unit") if key in row}
        for line in found.values() if self.ratio else ():
            ours, peer = (line.get(column) for column in self.ratio or ())
            if ours is not None and peer is not None:
                is_rate = str(line.get("unit", "")).endswith("/s")
                ratio = Decimal(ours) / peer if is_rate else Decimal(peer) / ours
                line.setdefault(RATIO, ratio)
        return dict(sorted(found.items(), key=_natural) if self.in_order else found)

    def markdown(self) -> str:
        """The table, with a line per name."""
        lines = self.lines()
        units = {line.get("unit") for line in lines.values()}
        body = [["---"] * (1 + len(self.columns))]
        for name, line in lines.items():
            unit = f", {line['unit']}" if len(units) > 1 and "unit" in line else ""
            body.append([name + unit, *(self._cell(line, column) for column in self.columns)])
        table = [[self.first, *self.columns], *body]
        text = "\n".join("| " + " | ".join(cells) + " |" for cells in table)
        for word, other in self.words.items():
            text = text.replace(word, other)
        return text

    def _cell(self, line: Mapping[str, Any], column: str) -> str:
        if line.get(column) is None:
            return ""
        show = self.columns[column]
        text = show(line[column])
        if show is share_of and "limit" in line:
            text += f" of {line['limit']}"
        if column in line["intervals"]:
            text += f" ({' to '.join(map(show, line['intervals'][column]))})"
        return text


@cache
def _file(name: str) -> dict[str, Any]:
    text = (HERE / name).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return content


def _natural(item: tuple[str, Any]) -> list[Any]:
    parts = re.split(r"(\d+)", item[0].replace(",", ""))
    return [int(part) if part.isdecimal() else part for part in parts]


def plain(value: Number) -> str:
    """As the file has it, with commas between thousands."""
    return f"{value:,}"


def percent(value: Number) -> str:
    """A share."""
    return f"{value:.0%}".replace("%", " %")


def share_of(value: Number) -> str:
    """A share, behind which the line's limit is named."""
    return percent(value)


def finer_percent(value: Number) -> str:
    """A share near the whole."""
    return f"{value:.2%}".replace("%", " %")


def times(value: Number) -> str:
    """A ratio."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2f}"


def rounded(value: Number) -> str:
    """No more digits than repeat."""
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def one_digit(value: Number) -> str:
    """A mean of counts, or a rate."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def same(columns: str, show: Show) -> dict[str, Show]:
    """Columns, apart by semicolons, that all show their numbers alike."""
    return dict.fromkeys(columns.split("; "), show)


RATIO, SHARE, VLLM = "times as fast", "share of the limit", "vLLM 0.26"
PEERS = f"{VLLM} / llama.cpp"
H200 = tuple(f"h200/2026-11-2{day}.json" for day in range(9))  # by the last digit of the day
H100, H100_LATER = "h100/2026-11-23.json", "h100/2026-11-25.json"
ZEN5, ZEN4 = "zen5/2026-11-21.json", "zen4/2026-11-23.json"
PEER = "peers/vllm-0.26-h200.json"
LLAMA = {ZEN5: "peers/llama-cpp-0.3.36-zen5.json", ZEN4: "peers/llama-cpp-0.3.36-zen4.json"}
BATCHES = "1; 8; 32; 64; 128; 256"
SIZES = "1; 8; 32; 128; 1,024 tokens; 8,000 tokens"
RUN = {
    "ttft_ms": "Regatta",
    "tpot_ms": "Regatta",
    "share_of_limit": SHARE,
    "decode_bandwidth_share": SHARE,
    "prompt_experts": "experts",
    "decode_experts": "experts",
}
SKEWED = {key: f"{column}, skewed" for key, column in RUN.items()}
STEPS = ("prompt", "decode")
BESIDE: dict[str, Show] = {"Regatta": one_digit, "llama.cpp": one_digit, RATIO: times}
REAL_MODELS = {"smollm2": "SmolLM2-135M, `Q4_1`", "gemma3": "Gemma 3 270M, `Q4_K_M`"}
WORDS = {
    "decode": "解码", "batch": "批大小", "prompt of": "提示词", " tokens/s": " token/s",
    "ms per token": "毫秒/token", "ms to the first token": "首 token 毫秒",
    " requests of 512 in, 256 out": " 条请求，输入 512，输出 256", "output ": "输出 ",
    "of bandwidth": "带宽", "of bfloat16 products": "bfloat16 算力", RATIO: "速度之比",
    SHARE: "占设备上限",
}  # fmt: skip


def beside_llama(file: str) -> list[Source]:
    """Both sides of a file of predict.bench.peer, and their ratio."""
    rates = ("prompt_tokens_per_s", "decode_tokens_per_s")
    return [
        Source(file, "regatta", dict.fromkeys(rates, "Regatta")),
        Source(file, "llama.cpp", dict.fromkeys(rates, "llama.cpp")),
        Source(file, "ratios", dict.fromkeys((f"{rate}_times_as_good" for rate in rates), RATIO)),
    ]


def peer_rates(file: str) -> list[Source]:
    """Both sides of a file as predict.bench.peer wrote it: prompts and decoding apart."""
    return [
        Source(file, suite, {f"{step}_tokens_per_s{end}": f"{step}, {column}" for step in STEPS})
        for suite, end, column in (
            ("regatta", "", "Regatta"), ("llama.cpp", "", "llama.cpp"),
            ("ratios", "_times_as_good", RATIO),
        )
    ]  # fmt: skip


def llama_record(file: str, suite: str) -> list[Source]:
    """Ours and llama.cpp's of a record by hand."""
    ours = {"regatta": "Regatta", "bandwidth_gbs": "GB/s beside ours", "times_as_good": RATIO}
    theirs = {"value": "llama.cpp", "bandwidth_gbs": "GB/s beside llama.cpp"}
    return [Source(file, suite, ours), Source(LLAMA[file], suite, theirs)]


HEADLINE = [
    Source(file, "bfloat16", {"dynamic": "Regatta", "regatta": "Regatta", "value": PEERS,
                              "share_of_limit": SHARE}, prefix, only)
    for files, prefix, only in (
        ((H200[2], PEER), "H200, Llama-3-8B, ", r"batch 1$|batch 128$|1,024 t| 512 req"),
        ((ZEN5, LLAMA[ZEN5]), "CPU, ", "Qwen"),
    )
    for file in files
]  # fmt: skip
HEADLINE_COLUMNS: dict[str, Show] = {
    "Regatta": plain, PEERS: plain, RATIO: times, SHARE: share_of,
}  # fmt: skip
TABLES: dict[str, Table] = {
    "headline": Table(HEADLINE, HEADLINE_COLUMNS, "bfloat16", ("Regatta", PEERS)),
    "headline-zh": Table(
        HEADLINE, HEADLINE_COLUMNS, "bfloat16", ("Regatta", PEERS), words=WORDS
    ),
    "h200-bfloat16": Table(
        [Source(H200[2], "bfloat16", {"share_of_limit": SHARE}),
         Source(PEER, "bfloat16", {"value": VLLM})],
        {**same(f"dynamic; static; {VLLM}", plain), RATIO: times, SHARE: share_of},
        ratio=("dynamic", VLLM),
    ),
    "h200-quantized": Table(
        [Source(file, "quantized") for file in (H200[3], H200[2], PEER)],
        same(f"{BATCHES}; 512 tokens; 1,024 tokens; 8,000 tokens", plain), "`--quant_type`",
    ),
    "h200-again": Table(
        [Source(H200[6], "quantized")],
        same(SIZES.replace("128", "128; 256"), rounded), "`--quant_type`", is_grid=True,
    ),
    "h200-prompts": Table(
        [Source(H200[3], "prompts")],
        same("none; weight_only_int8; weight_only_int4, groups of 128", plain), "tokens",
    ),
    "h200-drafts": Table(
        [Source(H200[2], "drafts", {
            "copy_without": "copy, tokens/s without", "copy_with": "with", "copy_speed_up": RATIO,
            "accepted_per_step": "accepted drafts per step",
            "random_speed_up": "random, times as fast"})],
        {**same("copy, tokens/s without; with", plain), RATIO: times,
         "accepted drafts per step": plain, "random, times as fast": times},
    ),
    "h200-batch-invariant": Table(
        [Source(H200[2], "batch_invariant")], same(SIZES, plain), "ms"
    ),
    "h200-attention": Table(
        [Source(H200[2], "decode_attention")],
        same("bfloat16; fp8; int8 per token; int4", percent), "requests x tokens",
    ),
    "h200-long-contexts": Table(
        [Source(H200[3], "long_contexts"), Source(H200[6], "long_contexts"),
         Source(PEER, "long_contexts")],
        {**same("bfloat16 cache; int8 per token cache; fp8 cache", rounded), VLLM: plain,
         RATIO: times}, "", ("bfloat16 cache", VLLM), is_grid=True,
    ),
    "h200-experts": Table(
        [Source(H200[6], "experts", RUN), Source(H200[7], "experts", RUN),
         Source(PEER, "experts", {"ms": VLLM})],
        {"Regatta": rounded, VLLM: plain, RATIO: times, SHARE: percent, "experts": one_digit},
        "ms", ("Regatta", VLLM), in_order=True,
    ),
    "h200-skewed": Table(
        [Source(H200[7], "experts_skewed", SKEWED), Source(H200[6], "experts", RUN),
         Source(H200[7], "experts", RUN)],
        {"Regatta": rounded, "experts": one_digit,
         "Regatta, skewed": rounded, "experts, skewed": one_digit}, "ms", is_closed=True,
        in_order=True,
    ),
    "h200-adapters": Table(
        [Source(H200[6], "adapters"), Source(PEER, "adapters")],
        {**same("none; eight in turn; vLLM 0.26 eight in turn", rounded), RATIO: times,
         **same("none on another GPU; eight not named", rounded)},
        "ms", ("eight in turn", "vLLM 0.26 eight in turn"), is_grid=True,
    ),
    "h200-guided": Table(
        [Source(H200[4], "guided", {"tokens_per_s": "tokens/s", "mask_ms_per_step":
                "masks of a step, ms", "times_as_fast": "with over without"})],
        {"tokens/s": plain, "with over without": times, "masks of a step, ms": plain},
        "Llama-3-8B, batch 32",
    ),
    "h200-served": Table(
        [Source(H200[4], "served", {
            "output_tokens_per_s": "output tokens/s", "share_of_offline": "share of offline",
            "ttft_p50_ms": "TTFT P50, ms", "ttft_p99_ms": "TTFT P99, ms",
            "itl_p50_ms": "ITL P50, ms", "itl_p99_ms": "ITL P99, ms"})],
        same("output tokens/s; share of offline; TTFT P50, ms; TTFT P99, ms; ITL P50, ms; "
             "ITL P99, ms", plain), "Llama-3-8B, 512 in, 256 out",
    ),
    "h200-shapes": Table(
        [Source(H200[5], "shapes", {"share_of_limit": SHARE})], {"ms": plain, SHARE: percent},
        "bfloat16",
    ),
    "h200-loading": Table(
        [Source(H200[5], "loading", {"ready_s": "ready, s", "memory_mib": "MiB on the GPU"})],
        same("ready, s; MiB on the GPU", plain), "`--quant_type`",
    ),
    "h200-hybrids": Table(
        [Source(H200[8], "hybrids")], same(SIZES, plain), "bfloat16, ms", is_grid=True
    ),
    "h100": Table([Source(H100, "quantized")], same(SIZES, plain), "`--quant_type`"),
    "h100-experts": Table(
        [Source(H100_LATER, "experts", {"share_of_limit": SHARE})], {"ms": plain, SHARE: percent}
    ),
    "h100-groups": Table(
        [Source(H100_LATER, "groups", {"tbs": "TB/s of weights"})],
        same("us; TB/s of weights", plain), "experts of Qwen3-30B-A3B",
    ),
    "cpu-bfloat16": Table(
        llama_record(ZEN5, "bfloat16"),
        {**same("Regatta; GB/s beside ours; llama.cpp; GB/s beside llama.cpp", plain),
         RATIO: times}, "tokens/s", ("Regatta", "llama.cpp"),
    ),
    "cpu-quantized": Table(
        llama_record(ZEN4, "quantized"), same(f"Regatta; llama.cpp; {RATIO}", plain), "tokens/s"
    ),
    "cpu-shapes": Table(beside_llama("zen4/2026-11-25.json"), BESIDE, "tokens/s"),
    "cpu-amx-peer": Table(
        peer_rates("granite-rapids/2026-11-28-peer.json"),
        {f"{step}, {column}": show for step in STEPS for column, show in BESIDE.items()},
        "tokens/s",
    ),
    "cpu-experts": Table(beside_llama("zen4/2026-11-27-experts.json"), BESIDE, "tokens/s"),
    "cpu-adapters": Table(
        [Source("zen4/2026-11-27-adapters.json", "adapters",
                {"before_ms": "none", "after_ms": "eight, in turn"})],
        {"none": rounded, "eight, in turn": rounded, "ratio": times}, "ms per token of the batch",
    ),
    "cpu-amx": Table(
        [Source(f"granite-rapids/2026-11-28{part}.json", "amx",
                {"before_ms": "without tiles", "after_ms": "with tiles"})
         for part in ("", "-codes")],
        {"without tiles": rounded, "with tiles": rounded, "ratio": times}, "ms",
    ),
    "cpu-amx-tiles": Table(
        [Source("granite-rapids/2026-11-28-tiles.json", "tiles", {"gflops": "GFLOP/s"})],
        {"GFLOP/s": rounded}, "tiles of bfloat16",
    ),
    "cpu-quantized-zen5": Table(
        [Source(ZEN5, "ratios_quantized")],
        same("Qwen2.5-0.5B shape; Llama-1B shape", plain), RATIO,
    ),
    "cpu-backends": Table(
        [Source(ZEN5, "backends")], same("compiled; plain", plain), "tokens/s"
    ),
    "cpu-operators": Table(
        [Source(ZEN5, "operators")], same("1 token; 8 tokens; 512 tokens", percent)
    ),
    "quality": Table(
        [Source("quality/2026-11-21.json", "demo_model", {
            "kl": "KL, nats", "top1": "same top token", "weights_mib": "weights, MiB"})],
        {**same("perplexity; ratio; KL, nats", plain), "same top token": finer_percent,
         "weights, MiB": plain}, "weights and cache",
    ),
    "quality-real-models": Table(
        [Source("quality/2026-11-28.json", "real_models", {
            f"{model}_{key}": f"{name}: {key}"
            for model, name in REAL_MODELS.items() for key in ("perplexity", "loss")})],
        {f"{name}: {key}": plain
         for name in REAL_MODELS.values() for key in ("perplexity", "loss")},
    ),
    "quality-groups": Table(
        [Source("quality/2026-11-28.json", "groups")], same("perplexity; ratio", plain)
    ),
    "cpu-activations": Table(
        [Source("xeon/2026-11-28.json", f"activations{suite}",
                {f"{step}_{kind}": f"{step}, {kind}{words}"
                 for step in ("prompt", "decode") for kind in ("int8", "float")})
         for suite, words in (("", ""), ("_avx2", ", AVX2"))],
        same("prompt, int8; decode, int8; prompt, float; decode, float; prompt, int8, AVX2; "
             "prompt, float, AVX2", plain), "tokens/s",
    ),
}  # fmt: skip


def with_tables(text: str) -> str:
    """`text` with every marked table made anew. Raises KeyError for a name that is not known."""

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        return f"<!-- table: {name} -->\n\n{TABLES[name].markdown()}\n\n<!-- /table -->"

    return MARKED.sub(made, text)


def stale_pages() -> list[Path]:
    """Pages whose tables are not what the numbers make."""
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("README*.md"))]
    return [page for page in pages if with_tables(text := page.read_text("utf-8")) != text]


def plot_all() -> None:
    """Writes the plots: bars of ratios, and lines over batches; needs matplotlib."""
    from matplotlib.figure import Figure

    bars, lines = Figure((8, 3.6), layout="constrained"), Figure((8, 4.2), layout="constrained")
    axes = bars.add_subplot()
    ratios = {name: float(line[RATIO]) for name, line in TABLES["headline"].lines().items()}
    drawn = axes.barh(list(ratios), list(ratios.values()), color="#00796b")
    axes.bar_label(drawn, fmt="%.2f", padding=3)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#444444", linewidth=1)
    axes.set_xlabel("times as fast as vLLM 0.26 (H200), llama.cpp (CPU)")
    axes = lines.add_subplot()
    for name, line in TABLES["h200-quantized"].lines().items():
        batches = [batch for batch in BATCHES.split("; ") if batch in line]
        axes.plot(batches, [float(line[batch]) for batch in batches], "-o", label=name)
    axes.set_ylim(0)
    axes.set_xlabel("batch")
    axes.set_ylabel("ms per token, Llama-3-8B on one H200")
    axes.legend(fontsize=8)
    for name, figure in (("headline", bars), ("h200-decode", lines)):
        figure.savefig(IMAGES / f"{name}.png", dpi=110, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, compare")
    parser.add_argument("--plots", action="store_true", help="make the plots too")
    arguments = parser.parse_args(argv)
    stale = stale_pages()
    if arguments.check:
        for page in stale:
            print(f"{page.relative_to(ROOT)}: a table is not current", file=sys.stderr)
        return 1 if stale else 0
    for page in stale:
        page.write_text(with_tables(page.read_text("utf-8")), encoding="utf-8")
    if arguments.plots:
        plot_all()
    return 0


if __name__ == "__main__":
    sys.exit(main())
