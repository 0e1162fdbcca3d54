"""Medusa heads, in their own file or within a model's, by Medusa's names or vLLM's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.loading.arrays import Part, StoredArray, listed
from predict.loading.checkpoint import Checkpoint
from predict.loading.drafters._found import (
    Found,
    check_sizes,
    linear,
    mapped,
    refuse_others,
    renamed,
)
from predict.loading.safetensors_reader import read_header
from predict.loading.torch_file import read_torch
from predict.nn.decoder import Decoder, Head
from predict.nn.drafters import MedusaHeads
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import (
    SlotPlan,
)
from predict.nn.spec import DecoderSpec, HeadSpec
from predict.nn.weights import WeightNames

if TYPE_CHECKING:
    from paddle import Tensor

MEDUSA_UNREAD = (
    *("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "num_heads"),
    *("num_hidden_layers", "medusa_fc_bias", "truncated_vocab_size", "version", "hidden_size"),
    *("vocab_size", "max_paths", "topk", "max_seq_len"),
)
MAX_HEADS = 64  # and layers of one
HEAD_NAME = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.)?(weight|bias)")
VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def medusa(path: Path, target: DecoderSpec, matrix: Callable[[], StoredArray]) -> Found:
    """Medusa's heads. Published configs may name another number of heads: tensors are counted.

    matrix: finds the model's for logits, whose rows heads of fewer tokens share.
    """
    reader = ConfigReader.from_dir(path)
    refuse_others(reader)
    torch_file, safe_file = path / "medusa_lm_head.pt", path / "medusa_lm_head.safetensors"
    if safe_file.exists() or torch_file.exists():
        read = read_header(safe_file) if safe_file.exists() else read_torch(torch_file)
        checkpoint = renamed(Checkpoint.of(path, read), _medusa_name)
    else:
        whole = Checkpoint(path)
        own = any(name.startswith("medusa_head.") for name in whole.tensors)
        checkpoint = renamed(
            whole,
            lambda name: None if own and "medusa_head." not in name else _medusa_name(name),
        )
    there, hidden = checkpoint.tensors, target.hidden_size
    numbers = [
        match for name in there if (match := re.match(r"(\d{1,9})\.(\d{1,9})\.linear\.", name))
    ]
    num_heads = 1 + max((int(match[1]) for match in numbers), default=-1)
    num_layers = 1 + max((int(match[2]) for match in numbers), default=-1)
    if not numbers:
        raise UserError(
            f"{path} has no Medusa heads (names like 0.0.linear.weight, or "
            "blocks.0.layers.0.weight); it has "
            f"{listed(list(there)[:3])}"
        )
    if max(num_heads, num_layers) > MAX_HEADS:
        raise UserError(
            f"{path} names {num_heads} Medusa heads of {num_layers} layers (allowed: up to "
            f"{MAX_HEADS} of each, numbered from 0); copy the file again"
        )
    first = there.get("0.0.linear.weight")
    if first is not None:
        check_sizes(reader, target, first.shape[0])
    ids = _mapped_tokens(checkpoint, target.vocab_size)
    rows = target.vocab_size if ids is None else len(ids)
    shared = reader.get_bool("original_lm_head", False)
    if shared and ids is not None and not any(name.endswith(".head.weight") for name in there):
        there["0.head.weight"] = Part(matrix(), ids)
    slots: dict[str, SlotPlan] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"{head}.{layer}.linear"
            slots[f"block_{head:03d}_{layer:03d}"] = linear(name, hidden, hidden, there)
        if f"{head}.head.weight" in there:
            slots[f"head_{head:03d}"] = linear(f"{head}.head", rows, hidden, there)
    owned = sum(name.startswith("head_") for name in slots)
    if owned not in (0, num_heads) and not (shared and owned == 1 and "head_000" in slots):
        raise UserError(
            f"{path} has {num_heads} Medusa heads and {owned} matrices for logits (allowed: one "
            "for each, or none where they share the model's); complete the download"
        )
    reader.check_unread(MEDUSA_UNREAD)
    names = WeightNames()
    return Found(
        *(checkpoint, reader, target, names, slots), target_ids=ids, ignored=("token_map",)
    )


def _mapped_tokens(checkpoint: Checkpoint, vocab_size: int) -> npt.NDArray[np.int64] | None:
    found = checkpoint.tensors.get("token_map")
    count = 0 if found is None else int(np.prod(found.shape))
    return mapped(checkpoint, "token_map", count, vocab_size, is_offset=False)


def _medusa_name(name: str) -> str | None:
    if match := VLLM_BLOCK.fullmatch(name):
        return f"{match[1]}.{match[2]}.linear.{match[3]}"
    if match := VLLM_HEAD.fullmatch(name):
        return f"{match[1]}.head.weight"
    if match := HEAD_NAME.fullmatch(name):
        return f"{match[1]}.{match[2] if match[3] else 'head'}.{match[3] or ''}{match[4]}"
    return name


def medusa_heads(slots: Mapping[str, Any], target: Decoder, columns: Tensor | None) -> MedusaHeads:
    """The heads of these slots; what is missing of them is the model's."""
    blocks: dict[str, list[Any]] = {}
    for name in sorted(slots):
        if name.startswith("block_"):
            blocks.setdefault(name[6:9], []).append(slots[name])
    spec = replace(target.head.spec, norm=None, width=None)
    shared = slots.get("head_000") if "head_001" not in slots else None
    heads = []
    for head in blocks:
        own = slots.get(f"head_{head}", shared)
        linear = target.head.linear if own is None else own
        share = target.head.share if own is None else None
        heads.append(Head(spec if own is None else HeadSpec(norm=None), None, linear, share=share))
    return MedusaHeads(tuple(map(tuple, blocks.values())), tuple(heads), columns)
