"""The numbers that flags and config fields may have: one table, whichever way a number comes in."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from predict.errors import UserError, quoted

MAX_LENGTH = 1 << 24  # tokens of a sequence, a step or a text
MAX_COUNT = 1 << 24  # of requests, repetitions, batches
MAX_INT32 = (1 << 31) - 1
MAX_INT64 = (1 << 63) - 1


@dataclass(frozen=True)
class Range:
    """The numbers that a key may have: `low` to `high`, without `low` itself where `above`."""

    low: float
    high: float
    whole: bool = True
    above: bool = False

    def __contains__(self, value: object) -> bool:
        # bool is an int in Python, but never a size in a config.
        kind = numbers.Integral if self.whole else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind):
            return False
        number: Any = value
        return (number > self.low if self.above else number >= self.low) and number <= self.high

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return (
            f"{kind} {'above' if self.above else 'from'} {_shown(self.low)} to {_shown(self.high)}"
        )


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.15g}"


def _share(above: bool = False) -> Range:
    return Range(0.0, 1.0, whole=False, above=above)


def _seconds() -> Range:
    return Range(0.0, 86400.0, whole=False, above=True)


# By the name of the flag (--NAME), which is the field's of EngineConfig where there is one. The
# fields of SamplingParams have their ranges there.
RANGES: Mapping[str, Range] = {
    # lengths, in tokens
    "src_length": Range(1, MAX_LENGTH),
    "max_length": Range(2, MAX_LENGTH),
    "total_max_length": Range(2, MAX_LENGTH),
    "max_new_tokens": Range(1, MAX_LENGTH),
    "max_num_batched_tokens": Range(1, MAX_LENGTH),
    "max_tokens": Range(2, MAX_INT64),
    "context_len": Range(1, MAX_LENGTH),
    "input_len": Range(1, MAX_LENGTH),
    "output_len": Range(1, MAX_LENGTH),
    "num_tokens": Range(1, 1 << 20),
    # counts
    "batch_size": Range(1, 1 << 20),
    "num_cache_blocks": Range(1, MAX_INT32),  # block tables hold int32
    "total_request_num": Range(1, MAX_COUNT),
    "num_requests": Range(1, MAX_COUNT),
    "repetitions": Range(0, MAX_COUNT),
    "speculate_max_draft_token_num": Range(1, 15),  # of predict.engine.drafts.MAX_DRAFT_TOKENS
    "speculate_max_ngram_size": Range(1, MAX_LENGTH),
    "speculate_verify_window": Range(1, 14),
    "speculate_max_candidate_len": Range(2, 10),
    "max_loras": Range(1, 1 << 12),
    "max_lora_rank": Range(1, 1 << 12),
    "max_cpu_loras": Range(1, MAX_COUNT),
    "seed": Range(0, MAX_INT64),  # reaches the sampling op as int64
    # shares, seconds
    "gpu_memory_utilization": _share(above=True),
    "copy_edits": _share(),
    "draft_agreement": _share(),
    "seconds": Range(0.0, 3600.0, whole=False, above=True),
    # a server; a grammar's or a schema's bytes: predict.guide has the largest
    "port": Range(0, 65535),
    "max_body_bytes": Range(1024, 1 << 30),
    "max_prompt_tokens": Range(1, MAX_LENGTH),
    "max_prompts": Range(1, 1 << 16),
    "max_answers": Range(1, 1024),  # of predict.request.MAX_SAMPLES
    "max_stop": Range(0, 256),  # of predict.system.bounds.MAX_STOPS
    "max_schema_bytes": Range(0, 1 << 18),
    "max_queue": Range(0, MAX_COUNT),
    "max_connections": Range(1, MAX_COUNT),
    "body_timeout": _seconds(),
    "request_timeout": _seconds(),
    "retry_after": _seconds(),
    "drain_timeout": _seconds(),
    "keep_alive_timeout": _seconds(),
    "tokenizer_threads": Range(1, 256),
    # replicas on Ray
    "num_replicas": Range(1, 1 << 16),
    "cpus_per_replica": Range(1, 1 << 12),
    "min_replicas": Range(1, 1 << 16),
    "max_replicas": Range(1, 1 << 16),
    "num_fronts": Range(1, 1 << 10),
    "target_ongoing_requests": Range(0.0, MAX_COUNT, whole=False, above=True),
    # calibration
    "ptq_step": Range(1, MAX_COUNT),
    "shift_step": Range(1, MAX_COUNT),
    "smooth_step": Range(1, MAX_COUNT),
    "awq_step": Range(1, MAX_COUNT),
    "autoclip_step": Range(1, MAX_COUNT),
    "gptq_step": Range(1, MAX_COUNT),
    "smooth_k_piece": Range(1, 64),
    "gptq_percdamp": _share(above=True),
    "search_alpha_min": _share(),
    "search_alpha_max": _share(),
    "search_scale_min": Range(0.0, 1e6, whole=False, above=True),
    "search_scale_max": Range(0.0, 1e6, whole=False, above=True),
}


def check_range(shown: str, value: object, name: str) -> None:
    """Raises UserError when `value` is none that RANGES allows for `name`.

    shown: what the message calls it.
    """
    allowed = RANGES[name]
    if value not in allowed:
        raise UserError(f"{shown} {quoted(value)} is not supported (allowed: {allowed})")
