"""The messages between the front and the engine: length-prefixed msgpack of typed records.

Both ends are ours, and of one version: the engine's process is started by the front's.
"""

from __future__ import annotations

import msgspec


class ModelInfo(msgspec.Struct, frozen=True):
    """What the engine has loaded."""

    model_type: str  # of config.json
    dtype: str
    device: str  # cpu, gpu:0
    mode: str  # dynamic, static
    vocab_size: int
    max_length: int  # tokens of prompt and answer together
    batch_size: int  # sequences at once
    num_cache_blocks: int
    block_size: int  # tokens of a block
    eos_token_ids: tuple[int, ...]
    quant_type: str | None
    kv_format: str
    speculate_method: str | None
    startup_seconds: float


class AnswerMetrics(msgspec.Struct, frozen=True, gc=False):
    """Of the answers to one prompt; times in seconds, None where it never got there."""

    num_prompt_tokens: int
    num_output_tokens: int  # of all answers
    num_cached_tokens: int  # of the prompt, taken from the prefix cache
    num_preemptions: int
    queue_seconds: float | None  # from `add` to the first step
    time_to_first_token: float | None  # from `add`
    time_per_output_token: float | None  # after the first, of the first answer
    seconds: float  # from `add` to the end
    finish_reasons: tuple[str, ...]  # of each sample


class Stats(msgspec.Struct, frozen=True):
    """Counts of the engine since it was started; sizes in bytes, prefix hits in tokens."""

    num_running: int  # sequences in the batch
    num_waiting: int
    num_steps: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_draft_spans: int
    num_cache_blocks: int
    num_used_blocks: int
    peak_memory_bytes: int
