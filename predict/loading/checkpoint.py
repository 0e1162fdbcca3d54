"""Lazy reading of safetensors checkpoints: headers first, each tensor's bytes when asked for."""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.system.files import json_type, open_regular, parse_json, read_json_object

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
MAX_SHOWN = 100  # characters of a name or value from a file
INDEX = "model.safetensors.index.json"
MAX_DIMS = 32
MAX_TENSOR_BYTES = 2**63 - 1
PARAMS = "model_state.pdparams"  # PaddleNLP's pickle, read where there is no safetensors file
SAMPLE_BYTES, NUM_SAMPLES = 4096, 64
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales|_scale_inv)")
# What an expert's own tensor ends in, by what all experts' does.
ENDINGS = {
    "": "weight",
    "_bias": "bias",
    "_blocks": "blocks",
    "_scales": "scales",
    "_scale_inv": "weight_scale_inv",
}
MAX_EXPERTS = 4096  # more are no model's, and would take long to name


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

    def read(self) -> npt.NDArray[Any]:
        """The tensor's values, bfloat16 as uint16. A copy that the caller may free at once.

        Not a memory map: its pages would count as this process's memory until the last tensor.
        Raises UserError for a file that has become shorter.
        """
        dtype = np.dtype(NUMPY_DTYPES[self.dtype])
        values = np.fromfile(self.file, dtype, math.prod(self.shape), offset=self.offset)
        if values.size != math.prod(self.shape):
            raise UserError(f"{self.file} is shorter than when it was opened; copy it again")
        return values.reshape(self.shape)


def checked_shape(shape: Any, dtype: str) -> tuple[tuple[int, ...], int]:
    """A shape that a file claims, and the bytes of a tensor of that shape and safetensors dtype.

    Raises ValueError that says what is wrong with it.
    """
    if not isinstance(shape, (list, tuple)):
        raise ValueError(f"is {json_type(shape)}, not a list of sizes")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"has {len(shape)} dimensions (at most {MAX_DIMS} are read)")
    for size in shape:
        if type(size) is not int or size < 0:
            shown = size if isinstance(size, (bool, int, float)) else json_type(size)
            raise ValueError(f"has the size {shown}; sizes are whole numbers, 0 or more")
    item = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    # Empty dimensions apart: NumPy multiplies the others, too.
    if math.prod(max(size, 1) for size in shape) * item > MAX_TENSOR_BYTES:
        raise ValueError("has more elements than 64 bits count")
    return tuple(shape), math.prod(shape) * item


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.

    Raises UserError for a truncated or broken file, and as the format's own library does where
    tensors overlap, or bytes belong to none: nothing can be hidden in such a file.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise _broken(path, f"it has {size} bytes")
        (header_size,) = struct.unpack("<Q", prefix)
        if header_size > min(size - 8, MAX_HEADER_BYTES):
            raise _broken(path, f"its header claims {header_size} bytes of {size}")
        header = parse_json(file.read(header_size), f"the header of {path}")
    if not isinstance(header, dict):
        raise _broken(path, f"its header is {json_type(header)}, not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _broken(path, "its __metadata__ is not an object of texts")
    start = 8 + header_size
    tensors = {name: _tensor_info(path, name, entry, start) for name, entry in header.items()}
    _check_ranges(path, tensors, start, size)
    return tensors


def _broken(path: Path, why: str) -> UserError:
    return UserError(f"{path} is not a whole safetensors file: {why}; copy it again")


def _tensor_info(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """What the header says of one tensor; start: the first byte behind the header."""
    shown = repr(name[:MAX_SHOWN])
    values = entry if isinstance(entry, dict) else {}
    missing = [key for key in ("dtype", "shape", "data_offsets") if key not in values]
    if missing:
        raise _broken(path, f"its entry for {shown} has no {' and no '.join(missing)}")
    dtype, offsets = values["dtype"], values["data_offsets"]
    if not isinstance(dtype, str) or dtype not in NUMPY_DTYPES:
        got = dtype[:MAX_SHOWN] if isinstance(dtype, str) else json_type(dtype)
        raise UserError(f"{path}: {shown} has dtype {got} (readable: {', '.join(NUMPY_DTYPES)})")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(type(offset) is int and offset >= 0 for offset in offsets)
    ):
        raise _broken(path, f"the data_offsets of {shown} are not two whole numbers, 0 or more")
    try:
        shape, num_bytes = checked_shape(values["shape"], dtype)
    except ValueError as error:
        raise _broken(path, f"the shape of {shown} {error}") from None
    begin, end = offsets
    if end - begin != num_bytes:
        raise _broken(
            path,
            f"{shown} lies in bytes {start + begin} to {start + end}, and {dtype} "
            f"{str(list(shape))[:MAX_SHOWN]} needs {num_bytes}",
        )
    return TensorInfo(path, dtype, shape, start + begin)


def _check_ranges(path: Path, tensors: Mapping[str, TensorInfo], start: int, size: int) -> None:
    """Raises UserError unless the tensors fill the file, from `start` on, one behind the other."""
    end, last = start, "the header"
    placed = sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].num_bytes))
    for name, info in placed:
        shown = repr(name[:MAX_SHOWN])
        if info.offset + info.num_bytes > size:
            raise _broken(
                path, f"{shown} ends at byte {info.offset + info.num_bytes}, the file at {size}"
            )
        if info.offset != end:
            kind = "they overlap" if info.offset < end else "the bytes between belong to none"
            raise _broken(
                path, f"{shown} begins at byte {info.offset}, {last} ends at {end}: {kind}"
            )
        end, last = end + info.num_bytes, shown
    if end != size:
        raise _broken(path, f"{last} ends at byte {end}, and the file has {size}")


class Checkpoint:
    """The tensors of a directory's safetensors files, read one at a time; of experts likewise.

    Raises UserError where no safetensors files are found, a shard is missing, a file is broken, or
    files and index contradict each other.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self.tensors: dict[str, TensorInfo] = {}
        index = self.directory / INDEX
        places = _read_index(index) if index.exists() else {}
        for path in self._files(places):
            found = read_header(path)
            twice = [name for name in found if name in self.tensors]
            if twice:
                other = self.tensors[twice[0]].file.name
                raise UserError(
                    f"{self.directory}: {path.name} and {other} both hold {listed(twice)}; keep "
                    "one of the two files"
                )
            self.tensors.update(found)
        self._check_places(index, places)
        self.tensors = one_by_one(self.tensors)

    def _files(self, places: Mapping[str, str]) -> list[Path]:
        if places:
            files = [self.directory / name for name in sorted(set(places.values()))]
            missing = [path.name for path in files if not path.exists()]
            if missing:
                raise UserError(
                    f"{self.directory} lacks {listed(missing)}, named by {INDEX}; complete the "
                    "download"
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

    def _check_places(self, index: Path, places: Mapping[str, str]) -> None:
        """Raises UserError unless every tensor lies in the file that the index says."""
        wrong = [
            name
            for name, file in places.items()
            if name not in self.tensors or self.tensors[name].file.name != file
        ]
        if wrong:
            where = self.tensors.get(wrong[0])
            raise UserError(
                f"{index} says that {wrong[0][:MAX_SHOWN]!r} is in {places[wrong[0]]}, and "
                f"{'no file of it' if where is None else where.file.name} has it (wrong in all: "
                f"{len(wrong)} of {len(places)} tensors); download index and files again"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors' shapes, by name."""
        return {name: info.shape for name, info in self.tensors.items()}

    def lies_in_file(self, name: str) -> bool:
        """Whether the tensor's bytes in its file are the values that `read` gives."""
        return True

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
        """The tensor's values, see TensorInfo.read."""
        return self.tensors[name].read()

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


def one_by_one(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors, those of all experts of a layer replaced by the experts' own.

    `experts.gate_up_proj` [E, ...] and `experts.down_proj` stand for E tensors
    `experts.0.gate_up_proj.weight` and so on, as most checkpoints have them: pieces of the file,
    each read on its own. Biases, and codes with their scales, have endings of their own.
    """
    seen: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        match = STACKED.fullmatch(name)
        if match is None or not info.shape or info.shape[0] > MAX_EXPERTS:
            seen[name] = info
            continue
        before, linear, ending = match.groups()
        for expert, piece in enumerate(_pieces(info)):
            seen[f"{before}.{expert}.{linear}.{ENDINGS[ending]}"] = piece
    return seen


def _pieces(info: TensorInfo) -> Iterator[TensorInfo]:
    """The tensors that lie one behind the other in this one, along its first axis."""
    first = replace(info, shape=info.shape[1:])
    for index in range(info.shape[0]):
        yield replace(first, offset=info.offset + index * first.num_bytes)


def _read_index(path: Path) -> dict[str, str]:
    """The file of each tensor by the index; UserError unless it names files of its own folder."""
    places = read_json_object(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UserError(f"{path}: weight_map is {json_type(places)}; it must name tensors' files")
    for name, file in places.items():
        if not isinstance(file, str):
            raise UserError(
                f"{path}: weight_map has {json_type(file)} for {name[:MAX_SHOWN]!r}; it must be "
                "the name of a file"
            )
        # Before any of them is opened or even looked for.
        if not file.endswith(".safetensors") or any(
            c in "/\\" or not c.isprintable() for c in file
        ):
            raise UserError(
                f"{path}: weight_map puts {name[:MAX_SHOWN]!r} into {file[:MAX_SHOWN]!r}; allowed "
                "are names of *.safetensors files in the same folder"
            )
    return places


def listed(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(name[:MAX_SHOWN] for name in names[:MAX_LISTED]) + more


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
