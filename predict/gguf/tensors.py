"""Tensors of a GGUF file under Hugging Face's names, and how each becomes one of theirs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.gguf.architectures import TENSORS, UNREAD, Architecture, architecture_of
from predict.gguf.config import config_of
from predict.gguf.metadata import GgufMetadata
from predict.gguf.reader import GgufFile, GgufTensor

LAYER = re.compile(r"blk\.([0-9]{1,4})\.([a-z0-9_.]+?)(?:\.(weight|bias))?")
TOP = re.compile(r"([a-z_]+)\.(weight|bias)")
NORM = re.compile(r".*_norm\.weight")
DELTA_NORM = re.compile(r".*\.ssm_norm\.weight")  # to which 1 is not added
DECAYS = re.compile(r".*\.ssm_a")  # -exp(A_log)
TAPS = re.compile(r".*\.(ssm_conv1d|shortconv\.conv)\.weight")  # [channels, width]
MAX_PIECES = 4096  # of one tensor: experts or heads
# Experts in forms that are not read, and what to do about them.
OTHER_EXPERTS = re.compile(r"blk\.[0-9]+\.(ffn_(gate|up|down)\.[0-9]+|ffn_gate_up_exps)\.weight")
# Tensors that to us end in neither .weight nor .bias.
WITHOUT_ENDING = (
    *("self_attn.sinks", "e_score_correction_bias", "expert_bias"),
    *("linear_attn.A_log", "linear_attn.dt_bias"),
)


@dataclass(frozen=True)
class Source:
    """Where a tensor's values come from, and what makes them those of Hugging Face."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    heads: int = 0  # of rows that lie in neighbouring pairs and go back into halves; 0: they do not
    groups: int = 0  # of rows that have two halves each, which go apart; 0: they do not
    offset: float = 0.0  # added to the values
    is_decay: bool = False  # the values are -exp of those

    @property
    def num_rows(self) -> int:
        return math.prod(self.tensor.shape[:-1])

    def row_order(self) -> npt.NDArray[np.int64] | None:
        """Which rows of the file are the tensor's, in order; None: as they are.

        Rotary dims i and i + R / 2 of a head stand side by side in the file; of strengths and
        decays of a state, those of each key head.
        """
        if self.groups:
            parts = np.arange(self.shape[0]).reshape(self.groups, 2, -1)
            return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(-1)
        if not self.heads:
            return None
        size = self.shape[0] // self.heads
        rows = np.arange(self.shape[0]).reshape(self.heads, size // 2, 2)
        return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)


def sources_of(file: GgufFile) -> dict[str, Source]:
    """The tensors by Hugging Face's names; those that are not known keep the file's."""
    data = GgufMetadata(file)
    row, config = architecture_of(data), config_of(file)
    names = row.names()
    found: dict[str, Source] = {}
    for name, tensor in file.tensors.items():
        if OTHER_EXPERTS.fullmatch(name):
            raise UserError(
                f"{file.path} has {name}: each expert's matrices apart, as llama.cpp wrote them "
                "at first, or gate and up in one; convert the model again with a newer "
                "llama.cpp, into ffn_gate_exps, ffn_up_exps and ffn_down_exps"
            )
        if name not in UNREAD:
            for ours, source in _sources(name, tensor, names, row, config):
                found[ours] = source
    return found


def _sources(
    name: str,
    tensor: GgufTensor,
    names: Mapping[str, str],
    row: Architecture,
    config: Mapping[str, Any],
) -> Iterator[tuple[str, Source]]:
    layer, top = LAYER.fullmatch(name), TOP.fullmatch(name)
    stem = ending = ""
    if layer and int(layer[1]) >= config["num_hidden_layers"]:  # of layers that draft tokens
        stem, ending = f"{row.drafting}{layer[1]}.{names.get(layer[2], layer[2])}", layer[3]
    elif layer and layer[2] in names:
        stem, ending = f"model.layers.{layer[1]}.{names[layer[2]]}", layer[3]
    elif top and (top[1] in TENSORS or top[1] in row.tensors):
        stem, ending = {**TENSORS, **row.tensors}[top[1]], top[2]
    is_offset = row.plus_one and NORM.fullmatch(name) and not DELTA_NORM.fullmatch(name)
    shape = tensor.shape
    if TAPS.fullmatch(name) and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    source = Source(
        *(tensor, shape), offset=-1.0 if is_offset else 0.0, is_decay=bool(DECAYS.fullmatch(name))
    )
    if not stem:
        yield name, source
    elif "{" in stem and len(tensor.shape) > 1 and tensor.shape[0] <= MAX_PIECES:
        for number, piece in enumerate(_pieces(tensor)):
            yield f"{stem}.{ending}".format(expert=number, head=number), Source(piece, piece.shape)
    elif layer and layer[2] == "ffn_gate_inp_shexp":
        yield f"{stem}.{ending}", replace(source, shape=(1, *tensor.shape[-1:]))
    else:
        heads = _heads(layer[2], tensor, config) if layer and row.permuted else 0
        is_short = stem.endswith(WITHOUT_ENDING)
        groups = config.get("linear_num_key_heads", 0) if layer and layer[2] == "ssm_ba" else 0
        if groups > 0 and tensor.shape[0] % (2 * groups):
            groups = 0  # found and named when tensors and config are compared
        named = stem if is_short else f"{stem}.{ending}"
        yield named, replace(source, heads=heads, groups=groups)


def _heads(stem: str, tensor: GgufTensor, config: Mapping[str, Any]) -> int:
    """Heads whose rows are out of order; 0 for other tensors."""
    key = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(stem)
    heads = config[key] if key else 0
    # Sizes that do not go together are found and named when tensors and config are compared.
    return heads if heads > 0 and tensor.shape[0] % (2 * heads) == 0 else 0


def _pieces(tensor: GgufTensor) -> Iterator[GgufTensor]:
    """The tensors that lie one behind the other in this one, along its first axis."""
    first = replace(tensor, shape=tensor.shape[1:])
    for index in range(tensor.shape[0]):
        yield replace(first, offset=tensor.offset + index * first.num_bytes)
