"""What a drafter's files say, and what all kinds of them need to read it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from predict.config.engine import EngineConfig
from predict.errors import UserError
from predict.loading.arrays import listed
from predict.loading.checkpoint import Checkpoint
from predict.loading.safetensors_reader import read_header
from predict.nn.drafters import ChainForm
from predict.nn.hf_config import ConfigReader
from predict.nn.plans import (
    BlockPlan,
    LinearPlan,
    SlotPlan,
)
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames

SHARED_FILE = "shared.safetensors"  # of an export: what drafters share with the model
KNOWN = ("eagle3", "eagle", "medusa")  # of speculators
OTHERS = {
    "dflash": "DFlash drafts a block of tokens at once",
    "dspark": "DSpark drafts a block of tokens at once",
    "peagle": "P-EAGLE drafts several tokens in one pass",
    "mtp": "speculators' copy of a layer for multi-token prediction",
    "mlp_speculator": "an MLP speculator",
}


@dataclass(frozen=True)
class Found:
    """What a drafter's files say. Names are those of `checkpoint`, which may be renamed ones."""

    checkpoint: Checkpoint
    reader: ConfigReader
    spec: DecoderSpec  # of its layers
    names: WeightNames
    slots: Mapping[str, SlotPlan]  # what it has besides its layers
    form: ChainForm | None = None  # None: Medusa's heads
    layers_change: Callable[[BlockPlan], BlockPlan] = lambda plan: plan
    target_ids: npt.NDArray[np.int64] | None = None  # of the head's rows
    ignored: tuple[str, ...] = ()


def shared_checkpoint(config: EngineConfig) -> Checkpoint:
    """What an export wrote for drafters beside the program of `config`, a run's."""
    directory = Path(config.model.model_name_or_path)
    if not (directory / SHARED_FILE).exists():
        raise UserError(
            f"{directory} has no {SHARED_FILE}, which a drafter of hidden states needs beside the "
            "program; export it with --speculate_method "
            f"{config.speculation.speculate_method} --return_full_hidden_states"
        )
    return Checkpoint.of(directory, read_header(directory / SHARED_FILE))


def renamed(checkpoint: Checkpoint, rename: Callable[[str], str | None]) -> Checkpoint:
    """The checkpoint with other names; None leaves a tensor out.

    Raises UserError where two tensors get one name.
    """
    made, of = copy.copy(checkpoint), dict[str, str]()
    made.tensors = {}
    for name, array in checkpoint.tensors.items():
        known = rename(name)
        if known is None:
            continue
        if known in of:
            raise UserError(
                f"{checkpoint.directory}: {listed([of[known], name])} are two names of one tensor; "
                "take one of them out"
            )
        of[known] = name
        made.tensors[known] = array
    return made


def check_sizes(reader: ConfigReader, target: DecoderSpec, hidden_size: int) -> None:
    vocab_size = reader.values.get("vocab_size", target.vocab_size)
    for name, own, theirs in (
        ("hidden_size", hidden_size, target.hidden_size),
        ("vocab_size", vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise UserError(
                f"{reader.path}: this head is for a model of {name} {own}, and the model has "
                f"{theirs}; --draft_model_name_or_path takes a head that was trained for this model"
            )


def refuse_others(reader: ConfigReader) -> None:
    """Raises UserError for another kind of drafter, by its name."""
    kind = reader.get_str("speculators_model_type", KNOWN[0]).lower()
    words = [kind, *(name.lower() for name in reader.get_texts("architectures") or [])]
    if reader.values.get("dflash_config") is not None:
        words.append("dflash")
    if reader.values.get("parallel_drafting"):
        words.append("peagle")
    for name, what in OTHERS.items():
        if any(word.replace("-", "").replace("_", "").startswith(name.replace("_", ""))
               for word in words):  # fmt: skip
            raise UserError(
                f"{reader.path}: {what}, which is not supported yet (--speculate_method eagle "
                "takes heads of EAGLE-1, 2, 3 and 3.1)"
            )
    if kind not in KNOWN:
        raise reader.wrong("speculators_model_type", ", ".join(KNOWN))


def linear(name: str, out: int, into: int, tensors: Iterable[str]) -> LinearPlan:
    return LinearPlan((name,), (out,), into, f"{name}.bias" in tensors)


def mapped(
    checkpoint: Checkpoint, name: str, count: int, vocab_size: int, is_offset: bool
) -> npt.NDArray[np.int64] | None:
    """The model's token of each of a drafter's; None where the file has no table of them."""
    if name not in checkpoint.tensors:
        return None
    if (dtype := checkpoint.tensors[name].dtype)[0] not in "IU":
        raise UserError(
            f"{checkpoint.directory}: {name} has dtype {dtype} (allowed: whole numbers, as I64); "
            "copy the file again"
        )
    values = checkpoint.read(name).astype(np.int64).reshape(-1)
    if len(values) != count or not count:
        raise UserError(
            f"{checkpoint.directory}: {name} has {len(values)} entries, and the drafter has "
            f"{count} tokens; the two do not belong together"
        )
    ids = values + np.arange(count) if is_offset else values
    if ids.min() < 0 or ids.max() >= vocab_size or len(np.unique(ids)) < count:
        raise UserError(
            f"{checkpoint.directory}: {name} names tokens from {ids.min()} to {ids.max()}, "
            f"{len(np.unique(ids))} different ones for {count} (allowed: a token of its own for "
            f"each, 0 to {vocab_size - 1}); this head is for another model"
        )
    return ids
