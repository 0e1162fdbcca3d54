"""EngineStats: an engine's counts, the same for Python's API, the server and /metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineStats:
    """Counts since the LLM was made; sizes in bytes, prefix hits in tokens."""

    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_draft_spans: int  # decode spans with drafts: each yields its accepted drafts and one more
    num_cache_blocks: int
    num_used_blocks: int
    peak_memory_bytes: int
    num_running: int = 0  # requests in the batch
    num_waiting: int = 0
    num_mask_steps: int = 0  # steps with masks of guides
    mask_seconds: float = 0.0  # of the host for these masks
    num_forced_tokens: int = 0  # that guides forced, without a step for each
    num_adapters: int = 0  # that requests may name
    num_adapter_pages: int = 0
    num_used_adapter_pages: int = 0  # with an adapter
    num_adapters_written: int = 0  # into their pages
    num_prefixes: int = 0  # tuned prefixes, that requests may have
    num_prefix_blocks: int = 0  # cache blocks of these prefixes
