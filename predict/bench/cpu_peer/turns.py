"""Both sides of one network and one kind of weights, measured in turns, and what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from predict.bench.cases import SHORT, UNITS, Case, number_text
from predict.bench.cpu_peer.kinds import Kind
from predict.bench.record import Row
from predict.bench.spread import Ratio, ratio_of_turns

Ask = Callable[[Mapping[str, Any]], Mapping[str, Any]]
OURS, PEER = "regatta", "llama.cpp"
# Metrics whose ratios are shown: the input rate's is that of the output rate.
SHOWN = ("ttft_ms", "tpot_ms", "output_tokens_per_s")
RATIO = "_times_as_good"


@dataclass
class Beside:
    """One case on both sides: a number per turn of each metric."""

    shape: str
    kind: Kind
    case: Case
    sizes: Mapping[str, Any]  # of the network
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # side -> metric
    bandwidth_gbs: dict[str, list[float]] = field(default_factory=dict)  # side -> beside its turns
    # Side -> processors that others took meanwhile, a number per turn where the system says it.
    others: dict[str, list[float]] = field(default_factory=dict)
    # Side -> distinct experts of a layer, of prompts and of decoding, where there are experts.
    experts: dict[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the case among all that a command measures."""
        return f"{self.shape}, {self.kind.name}, {self.case}"

    @property
    def decides(self) -> str:
        """The metric by which the case is named: decoding, or the first token."""
        return "tpot_ms" if self.case.output_len > 1 else "ttft_ms"

    def add(
        self,
        side: str,
        values: Mapping[str, float | None],
        bandwidth_gbs: float,
        others: float | None = None,
    ) -> None:
        """Notes one turn of a side."""
        held = self.samples.setdefault(side, {})
        for metric in UNITS:
            value = values.get(metric)
            if value is not None:
                held.setdefault(metric, []).append(value)
        self.bandwidth_gbs.setdefault(side, []).append(bandwidth_gbs)
        if others is not None:
            self.others.setdefault(side, []).append(others)

    def sides(self, metric: str) -> tuple[list[float], list[float]]:
        """Ours and the peer's, a number per turn."""
        return self.samples[OURS][metric], self.samples[PEER][metric]

    def times_as_good(self, metric: str, confidence: float) -> Ratio:
        """Above 1 where ours is better: rates are better when more, times when less."""
        ours, peer = self.sides(metric)
        return ratio_of_turns(*((peer, ours) if is_rate(metric) else (ours, peer)), confidence)

    def turn_ratios(self, metric: str) -> list[float]:
        """The same, of each turn."""
        rate, sides = is_rate(metric), zip(*self.sides(metric), strict=True)
        return [ours / peer if rate else peer / ours for ours, peer in sides]

    def metrics(self) -> Iterator[str]:
        """Those whose ratios are shown, and that the case has on both sides.

        A TPOT is the difference of two times, and may be nothing where both are short.
        """
        for metric in SHOWN:
            if metric in self.samples[OURS] and min(map(min, self.sides(metric))) > 0.0:
                yield metric

    @property
    def lacks_ratio(self) -> bool:
        """Whether the number by which the case is named has no ratio."""
        return self.decides not in self.metrics()


def is_rate(metric: str) -> bool:
    """Whether more is better."""
    return metric.endswith("_per_s")


def take_turns(
    cases: Sequence[Beside],
    ours: Ask,
    peer: Ask,
    num_turns: int,
    loaded: Mapping[str, Any],
    on_turn: Callable[[Beside, int], None],
    taken_by_others: Callable[[], float | None] = lambda: None,
) -> None:
    """Measures every case on both sides, turn by turn; the side that begins changes each turn.

    loaded: what ours said when it had loaded. taken_by_others: processors since its last call. The
    bandwidth of the memory is measured before, in between and after.
    """
    for turn in range(num_turns):
        for beside in cases:
            case = beside.case
            context = case.input_len + case.output_len / 2
            cached = case.num_requests * context * loaded["cache_bytes_per_token"]
            limits = {"limits_of": loaded["decode_weight_bytes"] + cached}

            def bandwidth(limits: Mapping[str, Any] = limits) -> float:
                return float(ours(limits)["read_bytes_per_s"]) / 1e9

            sides = ((OURS, ours), (PEER, peer))
            before = bandwidth()
            for side, ask in sides if turn % 2 == 0 else sides[::-1]:
                taken_by_others()
                values = ask({"case": str(case), "turn": turn})
                others = taken_by_others()
                after = bandwidth()
                beside.add(side, values, (before + after) / 2, others)
                before = after
            on_turn(beside, turn)


def most_others(cases: Sequence[Beside]) -> float:
    """The most processors that others took beside a turn."""
    return max((each for b in cases for held in b.others.values() for each in held), default=0.0)


def turn_line(beside: Beside, turn: int, num_turns: int) -> str:
    """What a turn brought: ours, the peer's and the ratio."""
    parts = []
    for metric in beside.metrics():
        ours, peer = (number_text(metric, side[-1]) for side in beside.sides(metric))
        ratio = beside.turn_ratios(metric)[-1]
        unit = UNITS[metric]
        parts.append(f"{SHORT[metric]} {ours} / {peer} {unit}, {ratio:.2f}")
    return f"turn {turn + 1} of {num_turns}  {beside.name}: " + "; ".join(parts)


def table(cases: Sequence[Beside], confidence: float) -> str:
    """Medians of the turns, how many times as good ours is, and between what that lies."""
    width = max(len("case"), *(len(beside.name) for beside in cases))
    between = f"{100 * confidence:g}% interval"
    lines = [
        f"{'case':<{width}}  {'number':<14}{'ours':>10}{'llama.cpp':>11}{'times as good':>15}"
        f"{between:>20}{'turns':>20}"
    ]
    for beside in cases:
        for metric in beside.metrics():
            ours, peer = (number_text(metric, statistics.median(s)) for s in beside.sides(metric))
            ratio, turns = beside.times_as_good(metric, confidence), beside.turn_ratios(metric)
            low = "-" if ratio.low is None else f"{ratio.low:.2f} to {ratio.high:.2f}"
            lines.append(
                f"{beside.name:<{width}}  {f'{SHORT[metric]}, {UNITS[metric]}':<14}{ours:>10}"
                f"{peer:>11}{ratio.value:>15.2f}{low:>20}"
                f"{f'{min(turns):.2f} to {max(turns):.2f}':>20}"
            )
    return "\n".join(lines)


def experts_line(beside: Beside) -> str:
    """How many experts a layer chooses on both sides, by which they do as much work."""
    of_steps = []
    for step in beside.experts[OURS]:
        ours, peer = (beside.experts[side][step] for side in (OURS, PEER))
        of_steps.append(f"{step.removesuffix('_experts')} {ours:.1f} / {peer:.1f}")
    return f"{beside.name}: distinct experts of a layer, ours / llama.cpp: {', '.join(of_steps)}"


def side_rows(cases: Sequence[Beside], side: str) -> list[Row]:
    """One side's numbers, as predict.bench.record and a file of peers have them."""
    rows = []
    for beside in cases:
        samples = beside.samples[side]
        values = {metric: statistics.median(each) for metric, each in samples.items()}
        values["measured_bandwidth_gbs"] = statistics.mean(beside.bandwidth_gbs[side])
        values |= beside.experts.get(side, {})
        if side in beside.others:
            values["processors_of_others"] = statistics.mean(beside.others[side])
        rows.append(
            {
                "name": beside.name,
                "shape": dict(beside.sizes),
                "work": beside.kind.work,
                "stored_as": {"layers": beside.kind.gguf_type, "head": beside.kind.gguf_head_type}
                if side == PEER
                else {"quant_type": beside.kind.name},
                "cases": {beside.decides: str(beside.case)},
                "values": values,
                "samples": samples,
            }
        )
    return rows


def ratio_rows(cases: Sequence[Beside], confidence: float) -> list[Row]:
    """How many times as good ours is: medians of the turns' ratios, intervals, every turn."""
    rows = []
    for beside in cases:
        ratios = {metric: beside.times_as_good(metric, confidence) for metric in beside.metrics()}
        rows.append(
            {
                "name": beside.name,
                "values": {metric + RATIO: ratio.value for metric, ratio in ratios.items()},
                "intervals": {
                    metric + RATIO: [ratio.low, ratio.high]
                    for metric, ratio in ratios.items()
                    if ratio.low is not None
                },
                "samples": {metric + RATIO: beside.turn_ratios(metric) for metric in ratios},
            }
        )
    return rows
