"""The formats of checkpoints, each found by its files: one row of FORMATS, nothing else to change.

A format gives the tensors of a directory under the names, and in the shapes, that its files have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from predict.errors import UserError
from predict.loading.arrays import MAX_SHOWN, StoredArray, listed
from predict.loading.gguf_tensors import read_gguf_model
from predict.loading.parallel_parts import merged_parts, patterns
from predict.loading.pdparams import read_params
from predict.loading.safetensors_reader import read_header
from predict.loading.torch_file import read_torch
from predict.system.files import json_type, read_json_object

INDEX = "model.safetensors.index.json"
PARAMS = "model_state.pdparams"
NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)(\.[a-z]+)")  # one shard of several


@dataclass(frozen=True)
class Format:
    """One way to keep a checkpoint.

    files: patterns of names; one file that fits makes the directory one of this format. open: the
    tensors of a directory by name, no values read; raises UserError. is_paddle: matrices are
    [in, out] whatever their names are.
    """

    name: str
    files: tuple[str, ...]
    open: Callable[[Path], Mapping[str, StoredArray]]
    is_paddle: bool = False

    def is_in(self, directory: Path) -> bool:
        """Whether a directory has files of this format, or is one."""
        if directory.is_file():
            return any(directory.match(pattern) for pattern in self.files)
        return any(True for pattern in self.files for _ in directory.glob(pattern))


def sharded(
    name: str,
    files: Sequence[str],
    index: str,
    read: Callable[[Path], Mapping[str, StoredArray]],
    is_paddle: bool = False,
) -> Format:
    """A format of one file or several, beside which an index may stand. read: one file's tensors.

    The file that the index is named for holds the whole model where it lies there, as transformers
    has it. The index of the files, else their numbers, tells whether one of them is missing.
    """
    single = index.removesuffix(".index.json")
    ending = Path(single).suffix

    def open_shards(directory: Path) -> dict[str, StoredArray]:
        path = directory / index
        there = sorted({path for pattern in files for path in directory.glob(pattern)})
        places = read_index(path, ending) if path.exists() else {}
        if single not in places.values() and directory / single in there:
            places = {}
            paths = [directory / single]
        else:
            paths = [directory / file for file in sorted(set(places.values()))] or there
        _check_files(directory, paths, index if places else None)
        tensors: dict[str, StoredArray] = {}
        files_of: dict[str, str] = {}
        for path in paths:
            found = read(path)
            _check_names(directory, path.name, found, files_of)
            tensors.update(found)
        _check_places(directory / index, places, files_of)
        return tensors

    return Format(name, (*files, index), open_shards, is_paddle)


# The first one that a directory has files of is read.
FORMATS = (
    sharded("safetensors of Hugging Face or PaddleNLP", ("*.safetensors",), INDEX, read_header),
    sharded(
        "PaddleNLP's pickle",
        (PARAMS, "model_state-*-of-*.pdparams"),
        f"{PARAMS}.index.json",
        read_params,
        is_paddle=True,
    ),
    Format("PaddleNLP's tensor- and pipeline-parallel parts", patterns(), merged_parts, True),
    sharded(
        "PyTorch's file",
        ("pytorch_model.bin", "pytorch_model-*-of-*.bin", "pytorch_model.pt", "model.pt"),
        "pytorch_model.bin.index.json",
        read_torch,
    ),
    Format("llama.cpp's GGUF", ("*.gguf",), read_gguf_model),
)


def format_of(directory: Path) -> Format | None:
    """The format of a directory's checkpoint; None where it holds no weights."""
    return next((each for each in FORMATS if each.is_in(directory)), None)


def known_format(directory: Path) -> Format:
    """As format_of; UserError that lists what is read where there are no weights."""
    found = format_of(directory)
    if found is None:
        read = "; ".join(f"{', '.join(each.files)} ({each.name})" for each in FORMATS)
        raise UserError(
            f"{directory} holds no file with weights that is read here; read are: {read}. Complete "
            "the download, or use --load_format dummy to run with random weights"
        )
    return found


def read_index(path: Path, ending: str) -> dict[str, str]:
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
        if not file.endswith(ending) or any(c in "/\\" or not c.isprintable() for c in file):
            raise UserError(
                f"{path}: weight_map puts {name[:MAX_SHOWN]!r} into {file[:MAX_SHOWN]!r}; allowed "
                f"are names of *{ending} files in the same folder"
            )
    return places


def _check_files(directory: Path, paths: Sequence[Path], index: str | None) -> None:
    """Raises UserError where a file is missing that the index, or the files' numbers, name."""
    if index is not None:
        missing = [path.name for path in paths if not path.exists()]
    else:
        missing = sorted(set(_numbered_files(paths)) - {path.name for path in paths})
    if missing:
        named = f", named by {index}" if index else ""
        raise UserError(f"{directory} lacks {listed(missing)}{named}; complete the download")
    if not paths:
        raise UserError(f"{directory} has {index}, and it names no file; complete the download")


def _numbered_files(paths: Sequence[Path]) -> Iterator[str]:
    """Names of all the shards of which some are there."""
    for path in paths:
        match = NUMBERED.fullmatch(path.name)
        if match is None or int(match[3]) > 10 * len(paths) + 100:  # no count of shards
            continue
        stem, number, count, ending = match.groups()
        for index in range(1, int(count) + 1):
            yield f"{stem}-{index:0{len(number)}d}-of-{count}{ending}"


def _check_names(
    directory: Path, file: str, found: Mapping[str, StoredArray], files_of: dict[str, str]
) -> None:
    """Notes which file has which tensors; UserError where another one has one of them, too."""
    twice = [name for name in found if name in files_of]
    if twice:
        raise UserError(
            f"{directory}: {file} and {files_of[twice[0]]} both hold {listed(twice)}; keep one of "
            "the two files"
        )
    files_of.update(dict.fromkeys(found, file))


def _check_places(index: Path, places: Mapping[str, str], files_of: Mapping[str, str]) -> None:
    """Raises UserError unless every tensor lies in the file that the index says."""
    wrong = [name for name, file in places.items() if files_of.get(name) != file]
    if wrong:
        where = files_of.get(wrong[0])
        raise UserError(
            f"{index} says that {wrong[0][:MAX_SHOWN]!r} is in {places[wrong[0]]}, and "
            f"{where or 'no file of it'} has it (wrong in all: {len(wrong)} of {len(places)} "
            "tensors); download index and files again"
        )
