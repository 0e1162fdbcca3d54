"""PaddleNLP's own checkpoints, seen as if Hugging Face had written them.

Names begin with the family ("llama.layers.0...") in place of "model.", matrices are [in, out], and
linears with shift and smooth keep theirs below ".layer". Files: *.safetensors, or
model_state.pdparams, a pickle that Paddle reads whole.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.nn.checkpoint import NUMPY_DTYPES, PARAMS, Checkpoint, TensorInfo

FAMILY = re.compile(r"^(?!model\.|lm_head)[a-z0-9_]+\.(?=layers\.|embed_tokens\.|norm\.)")
NOT_TRANSPOSED = ("embed_tokens.weight",)
STORED_AS = {np.dtype(kind): name for name, kind in NUMPY_DTYPES.items() if "F8" not in name}


def open_checkpoint(directory: str | Path) -> Checkpoint:
    """The directory's checkpoint, whoever wrote it; raises UserError as Checkpoint does."""
    directory = Path(directory)
    if not list(directory.glob("*.safetensors*")) and (directory / PARAMS).exists():
        return PaddleCheckpoint(directory, _load_params(directory / PARAMS))
    checkpoint = Checkpoint(directory)
    if any(FAMILY.match(name) for name in checkpoint.tensors):
        return PaddleCheckpoint(directory)
    return checkpoint


def _load_params(path: Path) -> dict[str, npt.NDArray[Any]]:
    import paddle

    try:
        values = paddle.load(str(path), return_numpy=True)
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not names and arrays")
    return {name: value for name, value in values.items() if isinstance(value, np.ndarray)}


class PaddleCheckpoint(Checkpoint):
    """A Checkpoint whose names and shapes are Hugging Face's; `read` turns matrices round."""

    in_file_order = False

    def __init__(self, directory: Path, params: dict[str, npt.NDArray[Any]] | None = None):
        """params: the tensors, where they are no safetensors files."""
        self.params = params
        if params is None:
            super().__init__(directory)
        else:
            self.directory = directory
            self.tensors = {
                name: TensorInfo(directory / PARAMS, STORED_AS[array.dtype], array.shape, 0)
                for name, array in params.items()
            }
        self.stored: dict[str, str] = {}  # names in the files
        seen = {}
        for name, info in self.tensors.items():
            ours = FAMILY.sub("model.", name).replace("_proj.layer.", "_proj.")
            shape = info.shape[::-1] if self._is_turned(ours) else info.shape
            seen[ours] = TensorInfo(info.file, info.dtype, shape, info.offset)
            self.stored[ours] = name
        self.tensors = seen

    def _is_turned(self, name: str) -> bool:
        return name.endswith(".weight") and not name.endswith(NOT_TRANSPOSED)

    def read(self, name: str) -> npt.NDArray[Any]:
        """See Checkpoint."""
        turned = self._is_turned(name)
        if self.params is not None:
            values = self.params[self.stored[name]]
        else:
            values = self._read_file(name, self.tensors[name].shape[:: -1 if turned else 1])
        return np.ascontiguousarray(values.T) if turned else values
