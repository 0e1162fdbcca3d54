"""PaddleNLP's own checkpoints, seen as if Hugging Face had written them.

Names begin with the family ("llama.layers.0...") in place of "model.", matrices are [in, out], and
linears with shift and smooth keep theirs below ".layer". Files: *.safetensors, or
model_state.pdparams, a pickle (see predict.loading.pdparams).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.loading.checkpoint import PARAMS, Checkpoint, TensorInfo, listed
from predict.loading.ernie import Part, parts_of
from predict.loading.pdparams import PickledArray, read_params

# The family that stands ahead of the table of tokens. Hugging Face's first OPT has "decoder" there.
FAMILY = re.compile(
    r"(?!model\.|decoder\.)([a-z0-9_]+\.)(embed_tokens|embeddings\.word_embeddings)\.weight"
)
ERNIE = "ernie."
NOT_TRANSPOSED = ("embed_tokens.weight", "_embeddings.weight")


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """The directory's checkpoint, whoever wrote it; raises UserError as Checkpoint does."""
    directory = Path(directory)
    if not list(directory.glob("*.safetensors*")) and (directory / PARAMS).exists():
        return PaddleCheckpoint(directory, read_params(directory / PARAMS))
    checkpoint = Checkpoint(directory)
    return PaddleCheckpoint(directory) if family_prefix(checkpoint.tensors) else checkpoint


def family_prefix(names: Iterable[str]) -> str:
    """What names begin with in PaddleNLP's files, the point included; empty in others."""
    return next((match[1] for match in map(FAMILY.fullmatch, names) if match), "")


def is_turned(name: str) -> bool:
    """Whether PaddleNLP stores a tensor as [in, out]; `name` is Hugging Face's."""
    return name.endswith(".weight") and not name.endswith(NOT_TRANSPOSED)


class PaddleCheckpoint(Checkpoint):
    """A Checkpoint whose names and shapes are Hugging Face's; `read` turns matrices round."""

    def __init__(self, directory: Path, params: dict[str, PickledArray] | None = None):
        """params: the tensors, where there are no safetensors files."""
        self.params = params
        if params is None:
            super().__init__(directory)
        else:
            self.directory = directory
            self.tensors = {
                name: TensorInfo(array.file, array.dtype, array.shape, 0)
                for name, array in params.items()
            }
        self.stored: dict[str, str] = {}  # names in the files
        prefix = family_prefix(self.tensors)
        seen = {}
        for name, info in self.tensors.items():
            ours = name.replace("_proj.layer.", "_proj.")
            if prefix and name.startswith(prefix):
                ours = "model." + ours.removeprefix(prefix)
            shape = info.shape[::-1] if is_turned(ours) else info.shape
            seen[ours] = TensorInfo(info.file, info.dtype, shape, info.offset)
            if ours in self.stored:
                raise UserError(
                    f"{directory}: {listed([name, self.stored[ours]])} are two names of one tensor"
                )
            self.stored[ours] = name
        self.tensors = seen
        self.parts: dict[str, Part] = {}  # by name, where tensors are read in parts
        if prefix == ERNIE:
            self.parts = parts_of({name: info.shape for name, info in seen.items()}, directory)
            self.tensors = {
                name: replace(seen[part.tensor], shape=part.shape(seen[part.tensor].shape))
                for name, part in self.parts.items()
            }
            self.whole = seen

    def lies_in_file(self, name: str) -> bool:
        """See Checkpoint."""
        return False

    def read(self, name: str) -> npt.NDArray[Any]:
        """See Checkpoint."""
        if name in self.parts:
            part = self.parts[name]
            return part.of(self._read_whole(part.tensor, self.whole[part.tensor]))
        return self._read_whole(name, self.tensors[name])

    def _read_whole(self, name: str, info: TensorInfo) -> npt.NDArray[Any]:
        turned = is_turned(name)
        if self.params is not None:
            values = self.params[self.stored[name]].read()
        else:
            values = replace(info, shape=info.shape[:: -1 if turned else 1]).read()
        return np.ascontiguousarray(values.T) if turned else values
