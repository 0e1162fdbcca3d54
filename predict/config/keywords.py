"""Settings of EngineConfig as keywords, for those who check types.

Made by docs/make_flags.py: do not edit. No program imports it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict


class Settings(TypedDict, total=False):
    """Those of a model's directory."""

    dtype: str
    load_format: str
    model_prefix: str | os.PathLike[str]
    model_type: str | None
    chat_template: str | os.PathLike[str] | None
    pooling: str | None
    device: str
    mode: str
    inference_model: bool | None
    batch_invariant: bool
    mla_use_matrix_absorption: bool | None
    seed: int
    lora_path: str | os.PathLike[str] | None
    attention: str
    block_size: int
    prefix_caching: bool
    prefix_cache_state_budget: int | None
    mamba_ssm_cache_dtype: str
    num_cache_blocks: int | None
    gpu_memory_utilization: float
    cachekv_int8_type: str | None
    batch_size: int
    src_length: int
    max_length: int | None
    max_num_batched_tokens: int | None
    priority_aging: float
    chunked_prefill: bool
    quant_type: str | None
    weightonly_group_size: int
    weight_block_size: tuple[int, ...] | list[int] | None
    lm_head_quant_type: str | None
    skip_list_names: tuple[str, ...] | list[str]
    weight_only_activations: str | None
    moe_quant_type: str | None
    use_fake_parameter: bool
    speculate_method: str | None
    speculate_max_draft_token_num: int
    speculate_max_ngram_size: int
    speculate_verify_window: int | None
    speculate_max_candidate_len: int | None
    draft_model_name_or_path: str | os.PathLike[str] | None
    draft_model_quant_type: str | None
    lora_modules: tuple[str, ...] | list[str]
    allow_adapter_updates: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int
    prefix_path: str | os.PathLike[str] | tuple[str, ...] | list[str]
    tensor_parallel_degree: int
    expert_parallel_degree: int | None
    rank_timeout: float
    limit_mm_per_prompt: Mapping[str, int]
    mm_processor_kwargs: Mapping[str, Any]
    max_image_pixels: int
    max_image_seconds: float
    mm_encoder_tp_mode: str
    encoder_budget: int | None
    allowed_media_domains: tuple[str, ...] | list[str]
    allowed_local_media_path: str | os.PathLike[str] | None


class EngineSettings(Settings):
    """All of EngineConfig."""

    model_name_or_path: str | os.PathLike[str]


class ChangedSettings(Settings, total=False):
    """Any of EngineConfig."""

    model_name_or_path: str | os.PathLike[str]
