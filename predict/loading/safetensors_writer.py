"""Writing safetensors files, one tensor in memory at a time, with the dtypes that NumPy lacks."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.loading.arrays import NUMPY_DTYPES, Computed, StoredArray, num_bytes
from predict.system.outputs import whole_file, write_whole

ALIGNMENT = 8  # bytes; the header is padded to it with spaces, as the format's own writer does
METADATA = {"format": "pt"}  # which transformers asks for


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, npt.NDArray[Any]]],
    metadata: Mapping[str, str] = METADATA,
) -> None:
    """Writes name -> (safetensors dtype, array); bfloat16 as uint16, e4m3 as uint8.

    The file appears whole, under its name, at the end, when its bytes are on the disk. Raises
    ValueError where an array does not have the dtype's NumPy type.
    """
    arrays = {
        name: Computed(dtype, values.shape, (), partial(np.asarray, values))
        for name, (dtype, values) in tensors.items()
    }
    write_stored(path, arrays, metadata)


def write_stored(
    path: Path,
    arrays: Mapping[str, StoredArray],
    metadata: Mapping[str, str] = METADATA,
    on_written: Callable[[], None] = lambda: None,
    alignment: int = ALIGNMENT,
) -> None:
    """As `write`, each array read when it is its turn. on_written: called behind each.

    alignment: the first array begins at a multiple of so many bytes.
    """
    head = header(arrays, metadata, alignment)
    with whole_file(path) as file:
        file.write(head)
        for name, array in arrays.items():
            values = np.asarray(array.read(), order="C")
            dtype = np.dtype(NUMPY_DTYPES[array.dtype])
            if values.dtype != dtype or values.shape != array.shape:
                raise ValueError(
                    f"{name}: {array.dtype} {list(array.shape)} needs "
                    f"{dtype}, got {values.dtype} {list(values.shape)}"
                )
            file.flush()  # tofile writes past Python's buffer
            values.tofile(file)
            del values  # before the next one is read
            on_written()


def header(
    arrays: Mapping[str, StoredArray],
    metadata: Mapping[str, str] = METADATA,
    alignment: int = ALIGNMENT,
) -> bytes:
    """What a file of these arrays begins with; their values follow, one behind the other."""
    made: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + num_bytes(array)
        made[name] = {
            "dtype": array.dtype,
            "shape": list(array.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(made, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % alignment)
    return len(text).to_bytes(8, "little") + text


def shards_of(sizes: Iterable[int], max_bytes: int) -> list[list[int]]:
    """Numbers of consecutive things of these bytes by shard, each of `max_bytes` or one thing."""
    shards: list[list[int]] = [[]]
    held = 0
    for number, size in enumerate(sizes):
        if shards[-1] and held + size > max_bytes:
            shards.append([])
            held = 0
        shards[-1].append(number)
        held += size
    return shards


def shard_name(number: int, count: int) -> str:
    """The file of shard `number`, from 0 on, of so many."""
    numbered = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
    return numbered if count > 1 else "model.safetensors"


def write_index(path: Path, names: Mapping[str, Collection[str]], num_bytes: int) -> None:
    """Writes which file has which tensors, where there are several. names: by file."""
    if len(names) > 1:
        places = {name: file for file, each in names.items() for name in each}
        write_json(path, {"metadata": {"total_size": num_bytes}, "weight_map": places})


def write_json(path: Path, values: Any) -> None:
    """Writes a JSON file, whole or not at all."""
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())


def as_stored(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    """float32 values in a safetensors dtype; bfloat16 as uint16, half to even."""
    values = np.asarray(values, np.float32, order="C")
    if dtype == "F32":
        return values
    if dtype == "F16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    not_numbers = np.isnan(values)  # whose bits would carry into the sign
    return np.where(not_numbers, bits >> 16 | 0x40, rounded).astype(np.uint16)
