"""EngineStats: an engine's counts, for whoever counts, Python's API, the server and /metrics."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, NamedTuple

from predict.system.options import option


class Metric(NamedTuple):
    """A count at /metrics."""

    name: str  # behind "regatta_"; a counter's ends in _total there
    is_now: bool  # holds now, and not since the start
    label: str = ""  # of a tuple's entries, whose values are 0, 1, ...


def _count(metric: str, meaning: str, is_now: bool = False, zero: Any = 0, label: str = "") -> Any:
    said = option(zero, meaning, is_flag=False).metadata
    return field(default=zero, metadata={**said, "metric": Metric(metric, is_now, label)})


def _now(metric: str, meaning: str, zero: Any = 0, label: str = "") -> Any:
    return _count(metric, meaning, True, zero, label)


@dataclass
class EngineStats:
    """Counts since the LLM was made; sizes in bytes, prefix hits in tokens."""

    # fmt: off
    num_steps: int = _count("engine_steps", "Steps that the engine has run.")
    num_scheduled_tokens: int = _count("engine_tokens", "Tokens that these computed.")
    num_prompt_tokens: int = _count("prompt_tokens", "Tokens of prompts that were taken in.")
    num_output_tokens: int = _count("generation_tokens", "Tokens that were generated.")
    num_prefix_hit_tokens: int = _count("prefix_cache_hits",
        "Tokens of prompts that the prefix cache had.")
    num_stateless_tokens: int = _count("prefix_cache_stateless",
        "Tokens of prompts that the prefix cache had, without a state behind them.")
    num_state_slots: int = _now("state_slots", "Slots for states of requests.")
    num_used_states: int = _now("state_used_slots", "Slots that unfinished requests hold.")
    num_kept_states: int = _now("state_kept_slots",
        "Slots with states that prompts and answers have left behind.")
    num_preemptions: int = _count("num_preemptions",
        "Sequences that lost their blocks to older ones.")
    num_draft_tokens: int = _count("spec_decode_num_draft_tokens",
        "Draft tokens that were verified.")
    num_accepted_draft_tokens: int = _count("spec_decode_num_accepted_tokens",
        "Draft tokens that stood.")
    num_draft_spans: int = _count("spec_decode_num_drafts",
        "Steps of a sequence with draft tokens: each yields those that stood, and one more.")
    num_accepted_by_position: tuple[int, ...] = _count("spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens that stood, by their place among those of a step of a sequence.", zero=(),
        label="position")
    num_forced_tokens: int = _count("guided_forced_tokens",
        "Tokens that guides forced, without a step.")
    num_mask_steps: int = _count("guided_steps", "Steps with masks of guides.")
    mask_seconds: float = _count("guided_mask_seconds",
        "Seconds that these masks took on the host.", zero=0.0)
    num_running: int = _now("num_requests_running", "Sequences in the batch.")
    num_waiting: int = _now("num_requests_waiting", "Sequences in the engine's queue.")
    num_cache_blocks: int = _now("kv_cache_blocks", "Blocks of the KV cache.")
    num_used_blocks: int = _now("kv_cache_used_blocks", "Blocks that unfinished requests hold.")
    peak_memory_bytes: int = _now("engine_peak_memory_bytes",
        "Largest memory of the engine so far, of all its ranks together.")
    rank_memory_bytes: tuple[int, ...] = _now("rank_peak_memory_bytes",
        "Largest memory of each rank so far, where there are several.", zero=(), label="rank")
    num_adapters: int = _now("adapters_loaded", "Adapters that requests may name.")
    num_adapter_pages: int = _now("adapter_pages", "Pages for adapters, of eight ranks each.")
    num_used_adapter_pages: int = _now("adapter_used_pages", "Pages that an adapter lies in.")
    num_adapters_written: int = _count("adapters_written",
        "Adapters that were written into their pages.")
    num_prefixes: int = _now("prefixes_loaded", "Tuned prefixes that requests may have.")
    num_prefix_blocks: int = _now("prefix_blocks", "Blocks of the KV cache that they fill.")
    # fmt: on


def with_accepted(counts: tuple[int, ...], num_accepted: int) -> tuple[int, ...]:
    """Counts by position, with one more at each of the first `num_accepted`."""
    longer = counts + (0,) * (num_accepted - len(counts))
    return tuple(count + (index < num_accepted) for index, count in enumerate(longer))


def metrics() -> list[tuple[Field[Any], Metric]]:
    """Each count's field and its metric."""
    return [(each, each.metadata["metric"]) for each in fields(EngineStats)]
