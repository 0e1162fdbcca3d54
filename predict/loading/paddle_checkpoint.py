"""PaddleNLP's own checkpoints, seen as if Hugging Face had written them.

Names begin with the family ("llama.layers.0...") in place of "model.", matrices are [in, out], and
linears with shift and smooth keep theirs below ".layer". Files: *.safetensors, or
model_state.pdparams, a pickle (see predict.loading.pdparams).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.loading.checkpoint import PARAMS, Checkpoint, TensorInfo, listed
from predict.loading.pdparams import PickledArray, read_params

FAMILY = re.compile(
    r"^(?!model\.|lm_head|gpt_neox\.)[a-z0-9_]+\.(?=layers\.|embed_tokens\.|norm\.)"
)
NOT_TRANSPOSED = ("embed_tokens.weight",)


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """The directory's checkpoint, whoever wrote it; raises UserError as Checkpoint does."""
    directory = Path(directory)
    if not list(directory.glob("*.safetensors*")) and (directory / PARAMS).exists():
        return PaddleCheckpoint(directory, read_params(directory / PARAMS))
    checkpoint = Checkpoint(directory)
    if any(FAMILY.match(name) for name in checkpoint.tensors):
        return PaddleCheckpoint(directory)
    return checkpoint


def is_turned(name: str) -> bool:
    """Whether PaddleNLP stores a tensor as [in, out]; `name` is Hugging Face's."""
    return name.endswith(".weight") and not name.endswith(NOT_TRANSPOSED)


class PaddleCheckpoint(Checkpoint):
    """A Checkpoint whose names and shapes are Hugging Face's; `read` turns matrices round."""

    in_file_order = False

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
        seen = {}
        for name, info in self.tensors.items():
            ours = FAMILY.sub("model.", name).replace("_proj.layer.", "_proj.")
            shape = info.shape[::-1] if is_turned(ours) else info.shape
            seen[ours] = TensorInfo(info.file, info.dtype, shape, info.offset)
            if ours in self.stored:
                raise UserError(
                    f"{directory}: {listed([name, self.stored[ours]])} are two names of one tensor"
                )
            self.stored[ours] = name
        self.tensors = seen

    def read(self, name: str) -> npt.NDArray[Any]:
        """See Checkpoint."""
        turned = is_turned(name)
        if self.params is not None:
            values = self.params[self.stored[name]].read()
        else:
            values = self._read_file(name, self.tensors[name].shape[:: -1 if turned else 1])
        return np.ascontiguousarray(values.T) if turned else values
