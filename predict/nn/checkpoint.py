"""Lazy reading of safetensors checkpoints: headers first, each tensor's bytes when asked for."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError

# bfloat16 has no NumPy dtype; Paddle reads uint16 arrays as bfloat16.
NUMPY_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_LISTED = 12
PARAMS = "model_state.pdparams"  # PaddleNLP's pickle, read where there is no safetensors file
SAMPLE_BYTES, NUM_SAMPLES = 4096, 64


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: its file, safetensors dtype, shape and first byte."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * np.dtype(NUMPY_DTYPES[self.dtype]).itemsize


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file; raises UserError on a truncated or broken one."""

    def broken(why: str) -> UserError:
        return UserError(f"{path} is not a whole safetensors file: {why}; copy it again")

    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise broken(f"it has {size} bytes")
            (header_size,) = struct.unpack("<Q", prefix)
            if header_size > min(size - 8, MAX_HEADER_BYTES):
                raise broken(f"its header claims {header_size} bytes of {size}")
            header = json.loads(file.read(header_size))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise broken(f"its header is not JSON ({error})") from None
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = entry["dtype"], tuple(int(d) for d in entry["shape"])
            begin, end = (int(o) for o in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise broken(f"its entry for {name!r} is {entry!r}") from None
        if dtype not in NUMPY_DTYPES:
            raise UserError(
                f"{path}: {name!r} has dtype {dtype} (readable: {', '.join(NUMPY_DTYPES)})"
            )
        num_bytes = math.prod(shape) * np.dtype(NUMPY_DTYPES[dtype]).itemsize
        if begin < 0 or end - begin != num_bytes or 8 + header_size + end > size:
            raise broken(
                f"{name!r} lies in bytes {8 + header_size + begin} to {8 + header_size + end} "
                f"of {size}, and needs {num_bytes}"
            )
        tensors[name] = TensorInfo(path, dtype, shape, 8 + header_size + begin)
    return tensors


class Checkpoint:
    """The tensors of a directory's safetensors files, read one at a time.

    Raises UserError where no safetensors files are found, a shard is missing or a file is broken.
    """

    in_file_order = True  # whether a tensor's bytes in its file are the values that `read` gives

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        for path in self._files():
            self.tensors.update(read_header(path))

    def _files(self) -> list[Path]:
        index = self.directory / "model.safetensors.index.json"
        if index.exists():
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise UserError(f"{index} cannot be read: {error!r}") from None
            files = [self.directory / name for name in names]
            missing = [path.name for path in files if not path.exists()]
            if missing:
                raise UserError(
                    f"{self.directory} lacks {listed(missing)}, named by {index.name}; "
                    "complete the download"
                )
            return files
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise UserError(
                f"{self.directory} holds no *.safetensors file; convert the checkpoint "
                "(transformers: save_pretrained(..., safe_serialization=True)), or use "
                "--load_format dummy to run with random weights"
            )
        return files

    def check(self, expected: Mapping[str, tuple[int, ...]], ignored: Iterable[str]) -> None:
        """Raises one UserError listing every missing, unexpected and wrongly shaped tensor.

        expected: name -> shape. ignored: substrings of names that are no weights.
        """
        missing = [name for name in expected if name not in self.tensors]
        unexpected = [
            name
            for name in self.tensors
            if name not in expected and not any(part in name for part in ignored)
        ]
        wrong = [
            f"{name} {list(self.tensors[name].shape)} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and self.tensors[name].shape != shape
        ]
        found = {"missing": missing, "unexpected": unexpected, "of the wrong shape": wrong}
        problems = [
            f"{len(names)} {kind}: {listed(names)}" for kind, names in found.items() if names
        ]
        if problems:
            raise UserError(
                f"{self.directory}: the tensors do not fit config.json; {'; '.join(problems)}"
            )

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor's values, bfloat16 as uint16. A copy that the caller may free at once.

        Not a memory map: its pages would count as this process's memory until the last tensor.
        """
        return self._read_file(name, self.tensors[name].shape)

    def _read_file(self, name: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        info = self.tensors[name]
        dtype = np.dtype(NUMPY_DTYPES[info.dtype])
        values = np.fromfile(info.file, dtype, math.prod(shape), offset=info.offset)
        return values.reshape(shape)

    def read_float(self, names: Iterable[str]) -> npt.NDArray[Any]:
        """The named tensors, one after another along axis 0, in one float dtype (bf16: uint16).

        Raises UserError where a tensor is not floating point.
        """
        names = list(names)
        dtypes = {self.tensors[name].dtype for name in names}
        for name in names:
            if self.tensors[name].dtype not in FLOAT_DTYPES:
                raise UserError(
                    f"{self.directory}: {name} has dtype {self.tensors[name].dtype}; "
                    f"unquantized weights must be one of {', '.join(FLOAT_DTYPES)}"
                )
        if len(dtypes) == 1:
            arrays = [self.read(name) for name in names]
        else:
            arrays = [to_float32(self.read(name)) for name in names]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def to_float32(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """float32 values of a float array; uint16 is read as bfloat16."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(array, np.float32)


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more


def checkpoint_digest(directory: str | Path) -> str:
    """A hash of config.json and of the tensors' names, shapes, places and samples of their bytes.

    Reading every byte of a large checkpoint would take minutes. Of PaddleNLP's pickle, which has no
    list of its tensors, size and samples are taken. A directory without tensors (--load_format
    dummy) has its config.json alone. Raises UserError for files that cannot be read.
    """
    directory = Path(directory)
    if list(directory.glob("*.safetensors*")):
        checkpoint = Checkpoint(directory)
        files = sorted({info.file for info in checkpoint.tensors.values()})
        tensors = [
            f"{name} {info.dtype} {info.shape} {info.offset}"
            for name, info in sorted(checkpoint.tensors.items())
        ]
    else:
        files = [path for path in (directory / PARAMS,) if path.exists()]
        tensors = [f"{path.name} {path.stat().st_size}" for path in files]
    try:
        state = hashlib.sha256((directory / "config.json").read_bytes())
        for tensor in tensors:
            state.update(tensor.encode())
        for path in files:
            add_samples(state, path)
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror}") from None
    return state.hexdigest()


def add_samples(state: hashlib._Hash, path: Path) -> None:
    """Adds bytes from all over a file, the whole of a small one, to a hash."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for at in np.linspace(0, max(0, size - SAMPLE_BYTES), NUM_SAMPLES).astype(int):
            file.seek(int(at))
            state.update(file.read(SAMPLE_BYTES))
