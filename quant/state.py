"""What an interrupted run has finished: one folder inside --output_path, removed at the end.

    calibration/state.json        inputs of the run, and how many layers are done
    calibration/hidden-<n>.npy    inputs of layer n, the first that is not done
    calibration/layer-<n>.*       tensors and scales of each layer that is done

Every file is whole before state.json names it, so a run may stop at any moment.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predict.errors import UserError
from quant.grids import Array

FOLDER = "calibration"
FORMAT = 1


@dataclass
class RunState:
    """The state of one run; `inputs` names everything that its results depend on."""

    folder: Path
    inputs: Mapping[str, Any]
    num_done: int = 0  # layers

    @classmethod
    def open(cls, output: Path, inputs: Mapping[str, Any], overwrite: bool) -> RunState:
        """The state in `output` when it is of the same inputs, else a new one.

        Raises UserError when there is one of other inputs, or a finished checkpoint.
        """
        folder = output / FOLDER
        if overwrite:
            shutil.rmtree(folder, ignore_errors=True)
        elif (output / "config.json").exists():
            raise UserError(
                f"--output_path {output} holds a finished checkpoint; choose another, or add "
                "--overwrite_output_dir"
            )
        path = folder / "state.json"
        if not path.exists():
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(
                    f"--output_path {output} cannot be written: {error.strerror or error}"
                ) from None
            return cls(folder, inputs)
        try:
            saved = json.loads(path.read_text())
            saved_inputs, num_done = saved["inputs"], int(saved["num_done"])
            known = saved["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError):
            known, saved_inputs, num_done = False, {}, 0
        if not known:
            raise UserError(
                f"{path} is not a state that this version wrote; add --overwrite_output_dir to "
                "begin anew"
            )
        wanted = json.loads(json.dumps(inputs))
        differing = [key for key in wanted if saved_inputs.get(key) != wanted[key]]
        if differing:
            listed = "; ".join(
                f"{key} was {saved_inputs.get(key)!r} and is {wanted[key]!r}" for key in differing
            )
            raise UserError(
                f"{folder} holds an interrupted run with other inputs: {listed}. Repeat its "
                "command to go on, choose another --output_path, or add --overwrite_output_dir"
            )
        return cls(folder, inputs, num_done)

    def hidden_path(self, layer: int) -> Path:
        """Inputs of a layer, float32 [T, H]."""
        return self.folder / f"hidden-{layer:05d}.npy"

    def layer_path(self, layer: int, suffix: str) -> Path:
        """Results of a layer."""
        return self.folder / f"layer-{layer:05d}{suffix}"

    def new_hidden(self, layer: int, shape: tuple[int, int]) -> Array:
        """A file-backed array to fill with a layer's inputs."""
        path = self.hidden_path(layer)
        return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)

    def read_hidden(self, layer: int, shape: tuple[int, int]) -> Array:
        """A layer's inputs, mapped; raises UserError where they are gone."""
        path = self.hidden_path(layer)
        try:
            hidden = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} cannot be read ({error}); add --overwrite_output_dir to begin anew"
            ) from None
        if hidden.shape != shape or hidden.dtype != np.float32:
            raise UserError(
                f"{path} holds {hidden.dtype} {list(hidden.shape)} instead of float32 "
                f"{list(shape)}; add --overwrite_output_dir to begin anew"
            )
        result: Array = hidden
        return result

    def finish_layer(self, layer: int) -> None:
        """Records that `layer`'s results and its successor's inputs are written."""
        self.num_done = layer + 1
        self.save()
        self.hidden_path(layer).unlink(missing_ok=True)

    def save(self) -> None:
        """Writes state.json, whole or not at all."""
        path = self.folder / "state.json"
        part = path.with_suffix(".part")
        values = {"format": FORMAT, "inputs": self.inputs, "num_done": self.num_done}
        part.write_text(json.dumps(values, indent=1))
        os.replace(part, path)

    def remove(self) -> None:
        """Deletes the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
