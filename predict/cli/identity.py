"""What the answers of a run depend on, for going on with it later: names of flags, and digests."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predict.cli.data import DataItem
from predict.cli.run_config import PredictorConfig
from predict.config.engine import EngineConfig
from predict.errors import TokenizerError, UserError
from predict.gguf.files import parts_of

if TYPE_CHECKING:
    from predict.images.placed import Pictures

# How much runs together, and in how much memory: what a run may be resumed with other values of.
OPERATIONAL = (
    *("batch_size", "max_num_batched_tokens", "num_cache_blocks", "gpu_memory_utilization"),
    *("max_loras", "max_lora_rank", "max_cpu_loras", "rank_timeout"),
)
# Digests stand for what these lead to.
FOLDERS = ("model_name_or_path", "draft_model_name_or_path", "lora_path")
PATHS = (*FOLDERS, "prefix_path")
LARGE = ("model_name_or_path", "draft_model_name_or_path")
ADAPTERS = ("lora_modules", "allow_adapter_updates")  # likewise
WEIGHT_SUFFIXES = (".safetensors", ".pdparams", ".pdiparams", ".bin", ".pt", ".gguf", ".npy")
READ_SUFFIXES = (".json", ".model", ".jinja", ".tiktoken")
READ_NAMES = ("merges.txt", "vocab.txt")


def run_inputs(
    config: PredictorConfig,
    items: Sequence[DataItem],
    token_ids: Sequence[Sequence[int] | TokenizerError],
    pictures: Sequence[Pictures | None] = (),
) -> dict[str, Any]:
    """Flags by name and, under names with a space, digests; for JSON. Raises UserError.

    The prompts' digests are of what was read and tokenized: a data file may be a pipe.
    """
    params = config.sampling_params
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    values |= config.engine.settings
    for name in (*OPERATIONAL, *PATHS, *ADAPTERS):
        values.pop(name, None)
    inputs: dict[str, Any] = json.loads(json.dumps(values, default=dict))
    inputs["prompts of --data_file"] = _digest(
        json.dumps([item.src, item.tgt, item.sampling], sort_keys=True).encode() for item in items
    )
    inputs["tokenizer or its chat template"] = _digest(
        b"failed" if isinstance(ids, TokenizerError) else array("q", ids).tobytes()
        for ids in token_ids
    )
    placed = [each for seen in pictures if seen is not None for each in seen.placed]
    if placed:
        inputs["pictures of --data_file"] = _digest(each.picture.digest for each in placed)
    for name, path in input_paths(config.engine).items():
        inputs[f"content of --{name}"] = folder_digest(Path(path), name not in LARGE)
    for name, path in config.engine.adapters.directories.items():
        inputs[f"content of adapter {name}"] = folder_digest(Path(path), is_small=True)
    return inputs


def input_paths(config: EngineConfig) -> dict[str, str]:
    """Folders, and files of prefixes, that an engine reads, by flag."""
    settings = config.settings
    found = {name: settings[name] for name in FOLDERS if settings.get(name) is not None}
    for name, path in config.adapters.prefixes.items():
        found[f"prefix_path {name}".strip()] = path
    return found


def folder_digest(directory: Path, is_small: bool = False) -> str:
    """A hash of the files of a model or adapter: of weights, sizes and samples of their bytes.

    directory: a folder, a prefix's file, or a GGUF file, which goes with its parts. Reading every
    byte of a large checkpoint would take minutes. is_small: every byte counts nevertheless. Raises
    UserError.
    """
    from predict.loading.checkpoint import add_samples
    from predict.loading.manifest import FileDigest

    state = hashlib.sha256()
    try:
        for path in sorted(directory.iterdir() if directory.is_dir() else parts_of(directory)):
            is_weights = path.suffix in WEIGHT_SUFFIXES
            is_read = path.suffix in READ_SUFFIXES or path.name in READ_NAMES
            if not (is_weights or is_read) or not path.is_file():
                continue
            state.update(f"{path.name} {path.stat().st_size}\n".encode())
            if not is_weights:
                state.update(hashlib.sha256(path.read_bytes()).digest())
            elif is_small:
                state.update("".join(FileDigest.of(path).sha256).encode())
            else:
                add_samples(state, path)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    return state.hexdigest()


def _digest(parts: Iterable[bytes]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "little") + part)
    return state.hexdigest()
