"""Tensors of GGUF files as a checkpoint has them: names, rows, norms and shapes of Hugging Face.

Types of blocks become float32 where they are read; layouts.gguf may keep their codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.gguf.architectures import KEYS_OF_LATENTS, VALUES_OF_LATENTS
from predict.gguf.files import gguf_of
from predict.gguf.opened import open_gguf
from predict.gguf.reader import PLAIN
from predict.gguf.tensors import Source, sources_of
from predict.loading.arrays import (
    NUMPY_DTYPES,
    Computed,
    Place,
    Shape,
    StoredArray,
    TensorInfo,
    places_of,
    values_at,
)
from predict.schemes import for_row_blocks


def read_gguf_model(model: Path) -> Mapping[str, StoredArray]:
    """The tensors of a GGUF file, or of the one model in a folder, by Hugging Face's names.

    Raises UserError where the file is damaged, or of a model that is not known.
    """
    file = gguf_of(model)
    if file is None:
        raise UserError(f"{model} holds no GGUF file of a model; pass the file")
    arrays = {name: _array(source) for name, source in sources_of(open_gguf(file)).items()}
    return _with_latents(arrays)


def _with_latents(arrays: dict[str, StoredArray]) -> dict[str, StoredArray]:
    """The arrays, those of keys and of values that latents become in one."""
    made = dict(arrays)
    for name, keys in arrays.items():
        if not name.endswith(f"{KEYS_OF_LATENTS}.weight"):
            continue
        values = name.replace(KEYS_OF_LATENTS, VALUES_OF_LATENTS)
        whole = name.replace(KEYS_OF_LATENTS, "self_attn.kv_b_proj")
        if values not in arrays or len(keys.shape) != 3 or len(arrays[values].shape) != 3:
            continue  # named when tensors and config are compared
        del made[name], made[values]
        made.setdefault(whole, _from_latents(keys, arrays[values]))
    return made


def _array(source: Source) -> StoredArray:
    tensor = source.tensor
    if tensor.kind in PLAIN and source == Source(tensor, source.shape):
        return TensorInfo(tensor.file, tensor.kind, source.shape, tensor.offset)
    return GgufArray(source)


@dataclass(frozen=True, eq=False)
class GgufArray:
    """A tensor of blocks, or one whose values or rows are not Hugging Face's as they lie."""

    source: Source

    @property
    def kind(self) -> str:
        """The name that ggml has for its type."""
        return self.source.tensor.kind

    @property
    def dtype(self) -> str:
        is_changed = self.source.offset or self.source.is_decay
        return self.kind if self.kind in PLAIN and not is_changed else "F32"

    @property
    def shape(self) -> Shape:
        return self.source.shape

    @property
    def places(self) -> tuple[Place, ...]:
        return ((self.source.tensor.file, self.source.tensor.offset),)

    def read(self) -> npt.NDArray[Any]:
        blocks = self.blocks()
        if self.kind in PLAIN:
            values: npt.NDArray[Any] = blocks.view(NUMPY_DTYPES[self.kind])
        else:
            values = _dequantized(blocks, self.source)
        if self.source.offset:
            values = to_float32(values) + np.float32(self.source.offset)
        if self.source.is_decay:
            values = _logarithms(values, self.source)
        return values.reshape(self.shape)

    def blocks(self) -> npt.NDArray[np.uint8]:
        """Bytes of the rows [rows, row_bytes], in Hugging Face's order."""
        tensor = self.source.tensor
        data = values_at(tensor.file, tensor.offset, np.uint8, tensor.num_bytes)
        rows = data.reshape(self.source.num_rows, tensor.row_bytes)
        order = self.source.row_order()
        if order is None:
            return rows
        if len(tensor.shape) == 1:  # a bias: a row of one value each
            return np.ascontiguousarray(data.reshape(len(order), -1)[order]).reshape(1, -1)
        return rows[order]


def _logarithms(values: npt.NDArray[Any], source: Source) -> npt.NDArray[np.float32]:
    """A_log of -exp(A_log). Raises UserError where that is no number below 0."""
    decays = to_float32(values)
    if not (decays < 0).all():
        raise UserError(
            f"{source.tensor.file}: decays of a state (ssm_a) are not all below 0; convert the "
            "model again"
        )
    logarithms: npt.NDArray[np.float32] = np.log(-decays)
    return logarithms


def _from_latents(keys: StoredArray, values: StoredArray) -> Computed:
    """kv_b_proj [heads * (key + value), latent] of its two parts, head by head.

    keys: [heads, latent, key]; values: [heads, value, latent]. Reading it raises UserError where
    they do not fit together.
    """
    heads, latent, key = keys.shape
    shape, places = (heads * (key + values.shape[1]), latent), places_of((keys, values))

    def read() -> npt.NDArray[Any]:
        first, second = (to_float32(part.read()) for part in (keys, values))
        if first.shape[:2] != (second.shape[0], second.shape[2]):
            raise UserError(
                f"{places[0][0]}: keys {list(first.shape)} and values {list(second.shape)} of "
                "latents do not fit together; convert the model again"
            )
        whole: npt.NDArray[Any] = np.concatenate([first.transpose(0, 2, 1), second], axis=1)
        return whole.reshape(shape)

    return Computed("F32", shape, places, read)


def _dequantized(blocks: npt.NDArray[np.uint8], source: Source) -> npt.NDArray[np.float32]:
    """float32 [rows, columns] of rows of blocks."""
    import gguf

    kind = gguf.GGMLQuantizationType[source.tensor.kind]
    values = np.empty((len(blocks), source.tensor.shape[-1]), np.float32)

    def work(rows: slice) -> None:
        values[rows] = gguf.quants.dequantize(blocks[rows], kind)

    for_row_blocks(len(blocks), values.shape[1], work)
    return values
