"""Several sizes in one run of `predict.bench.throughput`, beside what others reach there.

A case is REQUESTSxINPUTxOUTPUT: so many requests at once, of INPUT random tokens, each of which
decodes OUTPUT more. One output token measures the prompt; a batch and more, the time per token; the
rate counts prompts and outputs of all requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from predict.bench.ceilings import share_text
from predict.errors import UserError
from predict.nn.spec import DecoderSpec


@dataclass(frozen=True)
class Case:
    """Sizes of one case: requests at once, and tokens of each."""

    num_requests: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.num_requests}x{self.input_len}x{self.output_len}"


def parse_cases(names: Sequence[str]) -> tuple[Case, ...]:
    """The cases of --cases. Raises UserError for what is none."""
    return tuple(_parse(name) for name in names)


def _parse(name: str) -> Case:
    sizes = name.split("x")
    if len(sizes) != 3 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise UserError(
            f"--cases has {name!r}; a case is REQUESTSxINPUTxOUTPUT in whole numbers from 1 on, "
            "for example 8x128x256"
        )
    return Case(*(int(size) for size in sizes))


@dataclass(frozen=True)
class Peer:
    """What another engine reaches in a case; metric: a key of the results."""

    engine: str
    metric: str
    value: float


# vLLM 0.26.0 on one H200 (driver 580, CUDA 13.0): Llama-3-8B shape, random weights, greedy, token
# ids in, no prefix cache, one process. By quant_type and KV format, then by case.
_VLLM: dict[tuple[str, str], dict[str, tuple[str, float]]] = {
    ("dense", "dense"): {
        "1x128x257": ("tpot_ms", 4.795),
        "8x128x257": ("tpot_ms", 4.947),
        "32x128x257": ("tpot_ms", 5.387),
        "128x128x257": ("tpot_ms", 7.204),
        "1x1024x1": ("ttft_ms", 24.75),
        "1x8000x1": ("ttft_ms", 207.2),
        "512x512x256": ("output_tokens_per_s", 10031.0),
    },
    ("a8w8_fp8", "dense"): {
        "1x128x257": ("tpot_ms", 3.432),
        "8x128x257": ("tpot_ms", 3.524),
        "32x128x257": ("tpot_ms", 4.450),
        "128x128x257": ("tpot_ms", 5.826),
        "1x1024x1": ("ttft_ms", 16.50),
        "1x8000x1": ("ttft_ms", 139.6),
        "512x512x256": ("output_tokens_per_s", 13538.0),
    },
    ("a8w8_fp8", "fp8"): {"1536x1000x1000": ("output_tokens_per_s", 14424.0)},
}


def is_llama_8b(spec: DecoderSpec) -> bool:
    """Whether the network has the shape of Llama-3-8B."""
    sizes = (spec.hidden_size, spec.intermediate_size, spec.num_layers, spec.vocab_size)
    heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return sizes == (4096, 14336, 32, 128256) and heads == (32, 8, 128)


def peer_of(
    case: Case, spec: DecoderSpec, gpu: str | None, dtype: str, scheme: str, kv_format: str
) -> Peer | None:
    """What another engine is known to reach on the same GPU with the same work; mostly nothing."""
    if gpu is None or "H200" not in gpu or dtype != "bfloat16" or not is_llama_8b(spec):
        return None
    found = _VLLM.get((scheme, kv_format), {}).get(str(case))
    return None if found is None else Peer("vLLM 0.26", *found)


@dataclass(frozen=True)
class Metric:
    """A number of a case, and how it is written."""

    key: str
    label: str
    show: Callable[[float], str]
    is_rate: bool = False  # more is better


METRICS = {
    metric.key: metric
    for metric in (
        Metric("tpot_ms", "ms per token", "{:.3f}".format),
        Metric("ttft_ms", "ms to first token", "{:.2f}".format),
        Metric("output_tokens_per_s", "output tokens/s", "{:,.0f}".format, is_rate=True),
    )
}
SHARES = {"tpot_ms": "decode_bandwidth_share", "ttft_ms": "prefill_flops_share"}


def metric_of(results: dict[str, Any], peer: Peer | None) -> Metric:
    """The number that a case is about: its peer's, else the first one that was measured."""
    if peer is not None and results[peer.metric] is not None:
        return METRICS[peer.metric]
    return next(metric for key, metric in METRICS.items() if results[key] is not None)


def add_peer(results: dict[str, Any], peer: Peer | None) -> None:
    """Adds the number the case is about, the peer's, and how many times as good ours is."""
    metric = metric_of(results, peer)
    results["metric"] = metric.key
    if peer is None or metric.key != peer.metric:
        return
    ratio = results[metric.key] / peer.value
    results["peer"] = peer.engine
    results["peer_value"] = peer.value
    results["times_as_good"] = ratio if metric.is_rate else 1 / ratio


def cases_table(rows: Sequence[dict[str, Any]]) -> str:
    """One line per case: ours, the peer's, how many times as good, and the share of the limit."""
    lines = [
        f"{'case':<16}{'':<20}{'ours':>12}{'peer':>12}{'times as good':>15}{'share of limit':>16}"
    ]
    for row in rows:
        metric = METRICS[row["metric"]]
        share = row.get(SHARES.get(metric.key, ""))
        limit = "" if share is None else share_text(share)
        peer = ratio = name = ""
        if "peer" in row:
            peer, name = metric.show(row["peer_value"]), row["peer"]
            ratio = f"{row['times_as_good']:.2f}"
        lines.append(
            f"{row['case']:<16}{metric.label:<20}{metric.show(row[metric.key]):>12}{peer:>12}"
            f"{ratio:>15}{limit:>16}  {name}".rstrip()
        )
    return "\n".join(lines)
