"""What an interrupted run has finished: one folder inside --output_path, removed at the end.

    calibration/state.json        inputs of the run, and how many layers are done
    calibration/hidden-<n>.npy    inputs of layer n, the first that is not done
    calibration/layer-<n>.*       tensors and scales of each layer that is done

Every file is whole, and on the disk, before state.json names it, so a run may stop at any moment.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from predict.errors import UserError
from predict.loading.arrays import TensorInfo
from predict.loading.npy import read_npy
from predict.loading.safetensors_reader import read_header
from predict.system.files import json_type, read_json_object
from predict.system.outputs import sync_folder, write_whole
from quant.grids import Array

FOLDER = "calibration"
REMOVED = ".calibration.removed"  # what FOLDER is renamed to before it is deleted
STATE = "state.json"
OWN_FILES = (STATE, "hidden-*.npy", "layer-*.safetensors", "layer-*.json", ".*.part")
FORMAT = 1
ANEW = "add --overwrite_output_dir to begin anew"
LAYER_SCALES = ("act", "weight", "cache", "loss")  # what a layer's JSON file holds


@dataclass
class RunState:
    """The state of one run; `inputs` names everything that its results depend on."""

    folder: Path
    inputs: Mapping[str, Any]
    num_done: int = 0  # layers

    @classmethod
    def open(
        cls, output: Path, inputs: Mapping[str, Any], num_layers: int, overwrite: bool
    ) -> RunState:
        """The state in `output` when it is of the same inputs, else a new one.

        Raises UserError when there is one of other inputs or a damaged one, or a finished
        checkpoint.
        """
        folder = output / FOLDER
        for path in (output / REMOVED, folder):
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise UserError(f"{path} is no folder, and a run's state lies there; remove it")
        _delete(output / REMOVED)
        if overwrite:
            _delete(folder)
        if (folder / STATE).exists():
            num_done = _check_saved(folder, inputs, num_layers)
            return cls(folder, inputs, num_done)
        if not overwrite and (output / "config.json").exists():
            raise UserError(
                f"--output_path {output} holds a finished checkpoint; choose another, or add "
                "--overwrite_output_dir"
            )
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, inputs)

    def hidden_path(self, layer: int) -> Path:
        """Inputs of a layer, float32 [T, H]."""
        return self.folder / f"hidden-{layer:05d}.npy"

    def layer_path(self, layer: int, suffix: str) -> Path:
        """Results of a layer."""
        return self.folder / f"layer-{layer:05d}{suffix}"

    def new_hidden(self, layer: int, shape: tuple[int, int]) -> Array:
        """A file-backed array to fill with a layer's inputs. Raises OSError on a full disk."""
        path = self.hidden_path(layer)
        hidden = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        with path.open("rb+") as file:
            # A page of a map that finds no room on the disk is a SIGBUS.
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return hidden

    def read_hidden(self, layer: int, shape: tuple[int, int]) -> Array:
        """A layer's inputs, mapped; raises UserError where they are gone.

        The file's size is checked before it is mapped: a page behind the end would be a SIGBUS.
        """
        path = self.hidden_path(layer)
        try:
            found = read_npy(path)
        except UserError as error:
            raise UserError(f"{error}, or {ANEW}") from None
        if not isinstance(found, TensorInfo) or (found.dtype, found.shape) != ("F32", shape):
            raise UserError(
                f"{path} holds {found.dtype} {list(found.shape)}, and this run wrote float32 "
                f"{list(shape)}; {ANEW}"
            )
        return np.memmap(path, np.float32, "r", offset=found.offset, shape=shape)

    def finish_layer(self, layer: int) -> None:
        """Records that `layer`'s results and its successor's inputs are written."""
        self.num_done = layer + 1
        self.save()
        self.hidden_path(layer).unlink(missing_ok=True)

    def save(self) -> None:
        """Writes state.json, whole or not at all, when what it names is on the disk."""
        hidden = self.hidden_path(self.num_done)
        if hidden.exists():
            with hidden.open("rb") as file:
                os.fsync(file.fileno())
        values = {"format": FORMAT, "inputs": self.inputs, "num_done": self.num_done}
        write_whole(self.folder / STATE, json.dumps(values, indent=1).encode())

    def remove(self) -> None:
        """Deletes the folder; from the first moment of that on, no run goes on from it."""
        removed = self.folder.with_name(REMOVED)
        self.folder.rename(removed)
        sync_folder(removed.parent)
        _delete(removed)
        if removed.exists():  # somebody else has files there
            removed.rename(self.folder)


def _check_saved(folder: Path, inputs: Mapping[str, Any], num_layers: int) -> int:
    """How many layers a saved state has done; raises UserError where it cannot be gone on with."""
    path = folder / STATE
    try:
        saved = read_json_object(path)
    except UserError as error:
        raise UserError(f"{error}; or {ANEW}") from None
    saved_inputs, num_done = saved.get("inputs"), saved.get("num_done")
    if (
        saved.get("format") != FORMAT
        or not isinstance(saved_inputs, dict)
        or type(num_done) is not int
        or not 0 <= num_done <= num_layers
    ):
        raise UserError(f"{path} is not a state that this version wrote; {ANEW}")
    wanted = json.loads(json.dumps(inputs))
    listed = "; ".join(
        f"{key} was {saved_inputs.get(key)!r:.80} and is {value!r:.80}"
        for key, value in wanted.items()
        if saved_inputs.get(key) != value
    )
    if listed:
        raise UserError(
            f"{folder} holds an interrupted run with other inputs: {listed}. Repeat its "
            "command to go on, choose another --output_path, or add --overwrite_output_dir"
        )
    for layer in range(num_done):
        try:
            read_header(folder / f"layer-{layer:05d}.safetensors")
            read_layer_scales(folder / f"layer-{layer:05d}.json")
        except UserError as error:
            raise UserError(
                f"layer {layer} of an interrupted run is damaged: {error}, or {ANEW}"
            ) from None
    return num_done


def read_layer_scales(path: Path) -> dict[str, dict[str, Any]]:
    """A finished layer's entries of the scale files, and its loss, by LAYER_SCALES.

    Raises UserError where the file is missing, or is not what `layer_tensors` makes.
    """
    found = read_json_object(path, constants=True)  # a loss may be infinite
    for kind in LAYER_SCALES:
        values = found.get(kind)
        if not isinstance(values, dict):
            raise UserError(f"{path}: {kind!r} is {json_type(values)}; it must be an object")
        for name, value in values.items():
            numbers = value if isinstance(value, list) else [value]
            if not all(type(number) in (int, float) for number in numbers):
                raise UserError(f"{path}: {kind!r} has no numbers for {name[:80]!r}")
    return found


def _delete(folder: Path) -> None:
    """Deletes a state's files, and the folder where nobody else has put a file."""
    for pattern in OWN_FILES:
        for path in folder.glob(pattern):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
