"""What a config leaves to the model: its dtype, and the longest sequence."""

from __future__ import annotations

from collections import Counter
from typing import Any

from predict.config.engine import EngineConfig
from predict.config.model import AUTO, DTYPES
from predict.config.schemes import FIRST_BFLOAT16
from predict.device import devices
from predict.errors import UserError
from predict.gguf.files import gguf_of
from predict.loading.arrays import FLOAT_DTYPES, STORED_DTYPES
from predict.loading.checkpoint import Checkpoint
from predict.loading.layouts import quantization_config
from predict.loading.manifest import load_manifest
from predict.nn.hf_config import ConfigReader
from predict.nn.spec import DecoderSpec


def with_model_defaults(
    config: EngineConfig, spec: DecoderSpec, reader: ConfigReader
) -> EngineConfig:
    """The config, its dtype "auto" and its max_length None replaced by what suits the model.

    dtype: the checkpoint's or the exported program's. max_length: the default, but no more than the
    program, or a table of learned positions, has room for. Raises UserError where a file is broken,
    and for float16 where the family's hidden states go beyond it.
    """
    is_open = config.scheduling.max_length is None, config.model.dtype == AUTO
    is_exported = config.model.mode == "static"
    manifest = (
        load_manifest(config.model.model_name_or_path) if is_exported and any(is_open) else None
    )
    changes: dict[str, Any] = {}
    if is_open[0]:
        most = manifest.max_length if manifest else spec.num_learned_positions
        changes["max_length"] = min(config.max_length, most or config.max_length)
    if is_open[1]:
        changes["dtype"] = manifest.dtype if manifest else _dtype(config, spec, reader)
    config = config.changed(**changes) if changes else config
    if config.model.dtype == "float16" and spec.overflows_float16:
        raise UserError(
            f"dtype float16: hidden states of {spec.model_type} go beyond 65504, float16's "
            "largest number (allowed: bfloat16, float32)"
        )
    return config


def _dtype(config: EngineConfig, spec: DecoderSpec, reader: ConfigReader) -> str:
    """The checkpoint's dtype, or on a GPU the nearest that runs there."""
    found = reader.dtype()
    if found not in DTYPES:
        found = None if config.model.load_format == "dummy" else _most_frequent(config)
    dtype = found or "float32"
    if dtype == "float16" and spec.overflows_float16:
        dtype = "bfloat16"
    device = config.model.device
    if devices.kind_of(device) != "gpu":
        return dtype
    directory = config.model.model_name_or_path
    is_coded = quantization_config(reader) is not None or gguf_of(directory) is not None
    if dtype == "float32" and (is_coded or config.quantization.settings.scheme is not None):
        dtype = "bfloat16"  # whose kernels take codes; those of float32 do not
    try:
        gpu = devices.driver_info().gpus[devices.choose(device.partition(",")[0]).index]
    except UserError:  # loading refuses the device by name
        return dtype
    if dtype == "bfloat16" and gpu.capability < FIRST_BFLOAT16:
        return "float32" if spec.overflows_float16 else "float16"
    return dtype


def _most_frequent(config: EngineConfig) -> str | None:
    """The dtype that most floating-point tensors have, for a config.json that names none."""
    tensors = Checkpoint(config.model.model_name_or_path).tensors.values()
    counts = Counter(each.dtype for each in tensors if each.dtype in FLOAT_DTYPES)
    ((stored, _),) = counts.most_common(1) or [("F32", 0)]
    return {name: dtype for dtype, name in STORED_DTYPES.items()}.get(stored)


def with_whole_prompts(config: EngineConfig, spec: DecoderSpec) -> EngineConfig:
    """The config; for a model that runs prompts whole, with steps of max_length tokens.

    An explicit max_num_batched_tokens stays.
    """
    scheduling = config.scheduling
    if spec.sees_both_ways and config.cache.num_cache_blocks is None:
        # Nothing of a text is kept behind its step: there is room for the texts of one.
        tokens = max(config.token_budget, config.max_length)
        least = -(-tokens // config.cache.block_size) + scheduling.batch_size
        config = config.changed(num_cache_blocks=least)
    if not (spec.prefix or spec.sees_both_ways) or scheduling.max_num_batched_tokens is not None:
        return config
    return config.changed(max_num_batched_tokens=max(config.token_budget, config.max_length))
