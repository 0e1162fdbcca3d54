"""A checkpoint of any format: its tensors under Hugging Face's names, read one at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.gguf.described import read_model_json
from predict.gguf.files import gguf_of
from predict.loading.arrays import (
    FLOAT_DTYPES,
    Piece,
    StoredArray,
    TensorInfo,
    are_same,
    listed,
)
from predict.loading.formats import format_of, known_format
from predict.loading.paddle_checkpoint import as_hugging_face, prefixes_of, separate

SAMPLE_BYTES, NUM_SAMPLES = 4096, 64
STACKED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales|_scale_inv)")
# What Granite calls those tensors.
GRANITE = {
    ".block_sparse_moe.input_linear.weight": ".block_sparse_moe.experts.gate_up_proj",
    ".block_sparse_moe.output_linear.weight": ".block_sparse_moe.experts.down_proj",
}
# What an expert's own tensor ends in, by what all experts' does.
ENDINGS = {
    "": "weight",
    "_bias": "bias",
    "_blocks": "blocks",
    "_scales": "scales",
    "_scale_inv": "weight_scale_inv",
}
# What may be wrong where a tensor is missing, by a part of its name.
WAYS_OUT = {
    "lm_head.": "a model whose head is its table of tokens says so by tie_word_embeddings true in "
    "config.json; any other lacks a part: complete the download",
    **dict.fromkeys(
        ("vision_tower.", "visual."),
        "a checkpoint without its tower runs with text alone by --limit_mm_per_prompt "
        "'{\"image\": 0}'",
    ),
}
MAX_EXPERTS = 4096  # more are no model's, and would take long to name


class Checkpoint:
    """The tensors of a directory, whoever wrote it; of experts one by one.

    stored: by the names, and in the shapes, of the files, parallel parts merged. is_paddle: whether
    those are PaddleNLP's. tensors: as Hugging Face has them, but for experts. Raises UserError
    where there are no weights, a file is missing or broken, or files contradict each other.
    """

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        found = known_format(self.directory)
        self.stored = found.open(self.directory)
        self.is_paddle = found.is_paddle or bool(prefixes_of(self.stored)[0])
        self.tensors = one_by_one(self.as_hugging_face(), self.directory)

    @classmethod
    def of(cls, directory: Path, tensors: Mapping[str, StoredArray]) -> Checkpoint:
        """The tensors of one file of a directory, under the names that it has."""
        made = cls.__new__(cls)
        made.directory, made.stored, made.is_paddle = directory, tensors, False
        made.tensors = dict(tensors)
        return made

    @property
    def files_left(self) -> list[str]:
        """Names of files of the same format beside those that hold the tensors."""
        found = format_of(self.directory)
        if found is None or not self.directory.is_dir():
            return []
        read = {path for array in self.stored.values() for path, _ in array.places}
        there = {path for pattern in found.files for path in self.directory.glob(pattern)}
        return sorted(path.name for path in there - read if path.suffix != ".json")

    @property
    def takes_turns(self) -> bool | None:
        """Whether rows of gate and up take turns; None: not PaddleNLP's, so that nobody knows."""
        return bool(separate(self.stored)) if self.is_paddle else None

    def as_hugging_face(self) -> Mapping[str, StoredArray]:
        """The tensors by Hugging Face's names and in its shapes, those of experts as stored."""
        return as_hugging_face(self.stored, self.directory) if self.is_paddle else self.stored

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
            ways = [self._strange_files(unexpected)] if unexpected else []
            found_ways = {w for part, w in WAYS_OUT.items() if any(part in n for n in missing)}
            ways += sorted(found_ways)
            raise UserError(
                f"{self.directory}: the tensors do not fit config.json; "
                f"{'; '.join([*problems, *filter(None, ways)])}"
            )

    def _strange_files(self, unexpected: Iterable[str]) -> str:
        """What to do about files of which nothing is expected; empty where there are none."""
        files: dict[str, set[str]] = {}
        for name, array in self.tensors.items():
            files.setdefault(array.places[0][0].name, set()).add(name)
        strange = [file for file, names in files.items() if names <= {*unexpected}]
        if not strange or len(strange) == len(files):
            return ""
        return f"nothing of {listed(strange)} belongs to the model: move it into another folder"

    def are_same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same values."""
        first, second = self.tensors[one], self.tensors[other]
        if (first.dtype, first.places) == (second.dtype, second.places):
            return True
        values = [first.read(), second.read()]
        if first.dtype != second.dtype:
            values = list(map(to_float32, values))
        return are_same(*values)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: array.shape for name, array in self.tensors.items()}

    def in_file(self, name: str) -> TensorInfo | None:
        """Where a file has the tensor's bytes as `read` gives them; None where none has."""
        array = self.tensors[name]
        return array if isinstance(array, TensorInfo) else None

    def read(self, name: str) -> npt.NDArray[Any]:
        """The tensor's values, bfloat16 as uint16, in one block of memory of their own."""
        return np.asarray(self.tensors[name].read(), order="C")

    def read_as(self, name: str, *dtypes: str) -> npt.NDArray[Any]:
        """As `read`; raises UserError where the tensor has none of these dtypes."""
        dtype = self.tensors[name].dtype
        if dtype not in dtypes:
            raise UserError(
                f"{self.directory}: {name} has dtype {dtype} (allowed: {', '.join(dtypes)}); "
                "quantize it again, or copy the checkpoint again"
            )
        return self.read(name)

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


def one_by_one(tensors: Mapping[str, StoredArray], directory: Path) -> dict[str, StoredArray]:
    """The tensors, those of all experts of a layer replaced by the experts' own.

    `experts.gate_up_proj` [E, ...] and `experts.down_proj` stand for E tensors
    `experts.0.gate_up_proj.weight` and so on, as most checkpoints have them: pieces of the file,
    each read on its own. Biases, and codes with their scales, have endings of their own. Raises
    UserError where an expert's tensor stands alone, too.
    """
    seen: dict[str, StoredArray] = {}
    for name, array in tensors.items():
        made = stacked_pieces(name, array) or {name: array}
        if twice := [each for each in made if each != name and each in tensors]:
            raise UserError(f"{directory}: {listed(twice)} stands alone and in {name}; keep one")
        seen.update(made)
    return seen


def stacked_pieces(name: str, array: StoredArray) -> dict[str, StoredArray]:
    """The tensors of the experts whose tensors one has, behind one another; empty for others."""
    for ending, other in GRANITE.items():
        name = name.removesuffix(ending) + other if name.endswith(ending) else name
    match = STACKED.fullmatch(name)
    if match is None or not array.shape or array.shape[0] > MAX_EXPERTS:
        return {}
    before, linear, ending = match.groups()
    return {
        f"{before}.{expert}.{linear}.{ENDINGS[ending]}": array.piece(expert)
        if isinstance(array, TensorInfo)
        else Piece(array, expert)
        for expert in range(array.shape[0])
    }


def checkpoint_digest(directory: str | Path) -> str:
    """A hash of config.json and of the tensors' names, shapes, places and samples of their bytes.

    Reading every byte of a large checkpoint would take minutes. directory: a folder, or a GGUF
    file. One without tensors (--load_format dummy) has its config.json alone. Raises UserError for
    files that cannot be read.
    """
    directory = Path(directory)
    try:
        if gguf_of(directory) is None:
            state = hashlib.sha256((directory / "config.json").read_bytes())
        else:
            state = hashlib.sha256(repr(read_model_json(directory, "config.json")).encode())
        found = format_of(directory)
        stored = found.open(directory) if found else {}
        files: set[Path] = set()
        for name, array in sorted(stored.items()):
            places = [(path.name, offset) for path, offset in array.places]
            state.update(f"{name} {array.dtype} {array.shape} {places}".encode())
            files.update(path for path, _ in array.places)
        for path in sorted(files):
            state.update(f"{path.name} {path.stat().st_size}".encode())
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
