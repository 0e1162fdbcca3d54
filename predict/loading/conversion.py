"""A checkpoint written anew: in Hugging Face's layout or PaddleNLP's, one tensor in memory at once.

The shards of the target follow from the source and the options alone. Each appears under its name
when it is whole and on the disk, so that what lies there tells how far a run came: one that was
killed goes on behind the last whole shard. STATE says of what source and with which options, as
long as the target is not complete; config.json, which makes it a checkpoint, comes last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from predict.device.place import to_float32
from predict.errors import UserError
from predict.loading.arrays import FLOAT_DTYPES, STORED_DTYPES, Computed, StoredArray, num_bytes
from predict.loading.baichuan import as_baichuan
from predict.loading.checkpoint import Checkpoint, checkpoint_digest
from predict.loading.companions import copy_companions
from predict.loading.formats import INDEX
from predict.loading.layouts import quantization_config
from predict.loading.paddle_checkpoint import as_paddle
from predict.loading.paddle_config import as_hugging_face_config, as_paddle_config, is_alibi_llama
from predict.loading.safetensors_writer import (
    METADATA,
    as_stored,
    header,
    shard_name,
    shards_of,
    write_index,
    write_json,
    write_stored,
)
from predict.nn.hf_config import ConfigReader
from predict.system.files import read_json_object
from predict.system.outputs import sync_folder

STATE = ".convert.json"
FileLayout = Literal["hf", "paddle"]
PADDLE_METADATA = {"format": "np"}  # which PaddleNLP asks for
PADDLE_ONLY = ("gpt", "ernie")  # families that Hugging Face's library does not have
# What config.json says of ranks and of matrices in one, which the target does not have.
PARALLEL = ("tensor_parallel_degree", "tensor_parallel_rank", "pipeline_parallel_degree")
FUSED = ("fuse_attention_qkv", "fuse_attention_ffn")


@dataclass(frozen=True)
class Options:
    """What a conversion makes. dtype: of floating point; None: as stored."""

    layout: FileLayout
    dtype: str | None
    max_shard_bytes: int

    def __post_init__(self) -> None:
        if self.max_shard_bytes < 1:
            raise UserError(f"max_shard_size is {self.max_shard_bytes} bytes; it must be 1 or more")


def cast(array: StoredArray, dtype: str, name: str) -> Computed:
    """An array of floats in another dtype; read, UserError where a value has no place there."""

    def read() -> npt.NDArray[Any]:
        stored = array.read()
        with np.errstate(over="ignore"):  # said below, with the tensor's name
            values = to_float32(stored)
            made = as_stored(values, dtype)
        finite = np.isfinite(stored if stored.dtype == np.float64 else values)
        lost = int(np.count_nonzero(finite & ~np.isfinite(to_float32(made))))
        if lost:
            raise UserError(
                f"{name} has {lost} values beyond what {dtype} holds; use --dtype bfloat16 or "
                "float32"
            )
        return made

    return Computed(dtype, array.shape, array.places, read)


@dataclass(frozen=True)
class Shard:
    """One file of the target."""

    name: str
    arrays: Mapping[str, StoredArray]

    @property
    def num_bytes(self) -> int:
        return sum(map(num_bytes, self.arrays.values()))

    def is_whole(self, path: Path, metadata: Mapping[str, str]) -> bool:
        """Whether a file is what `write_stored` makes of the shard, by its header and size."""
        head = header(self.arrays, metadata)
        if not path.is_file() or path.stat().st_size != len(head) + self.num_bytes:
            return False
        with path.open("rb") as file:
            return file.read(len(head)) == head


@dataclass(frozen=True)
class Summary:
    """What a conversion wrote, and what lay there already."""

    num_tensors: int
    num_bytes: int
    num_shards: int
    num_kept: int


class Conversion:
    """One checkpoint on its way into a folder. Nothing is written before `run`.

    Raises UserError where the source cannot be read, or has no form in the layout.
    """

    def __init__(self, source: Path, options: Options):
        self.source, self.options = source, options
        self.config = ConfigReader.from_dir(source)
        self.checkpoint = self._open()
        self.metadata = METADATA if options.layout == "hf" else PADDLE_METADATA
        self.shards = list(_shards(self._cast(self._arrays()), options.max_shard_bytes))
        self.inputs: dict[str, Any] = {
            "source": checkpoint_digest(source),
            "format": options.layout,
            "dtype": options.dtype,
            "max_shard_size": options.max_shard_bytes,
        }

    def _open(self) -> Checkpoint:
        return Checkpoint(self.source)

    @property
    def num_tensors(self) -> int:
        return sum(len(shard.arrays) for shard in self.shards)

    def _arrays(self) -> Mapping[str, StoredArray]:
        """The target's tensors, in the dtypes of the source."""
        checkpoint, to_paddle = self.checkpoint, self.options.layout == "paddle"
        if checkpoint.is_paddle == to_paddle:
            return checkpoint.stored
        quantized = quantization_config(self.config)
        if quantized:
            kind = quantized.get("quant_type") or quantized.get("quant_method")
            kept = "hf" if to_paddle else "paddle"
            raise UserError(
                f"{self.config.path}: the checkpoint is quantized ({str(kind)[:80]}), and its "
                f"tensors have no form in the other layout; --format {kept} copies them as they "
                "are, and the unquantized checkpoint can be converted"
            )
        if to_paddle:
            return as_paddle(checkpoint.stored, self.config)
        if self.config.values.get("model_type") in PADDLE_ONLY:
            raise UserError(
                f"{self.config.path}: Hugging Face's library has no family like PaddleNLP's "
                f"{self.config.values['model_type']}; use --format paddle"
            )
        tensors = checkpoint.as_hugging_face()
        if is_alibi_llama(self.config.values):  # Hugging Face's Llama would leave ALiBi out
            return as_baichuan(tensors, self.config)
        return tensors

    def _cast(self, arrays: Mapping[str, StoredArray]) -> Mapping[str, StoredArray]:
        """The tensors in the dtype that was asked for."""
        if self.options.dtype is None:
            return arrays
        if quantization_config(self.config):
            raise UserError(
                f"{self.config.path}: the checkpoint is quantized, and --dtype would change its "
                "scales; leave --dtype out"
            )
        dtype = STORED_DTYPES[self.options.dtype]
        return {
            name: cast(array, dtype, name)
            if array.dtype in FLOAT_DTYPES and array.dtype != dtype
            else array
            for name, array in arrays.items()
        }

    def check_target(self, target: Path) -> None:
        """Raises UserError where the folder holds anything but an earlier part of this very run."""
        state = target / STATE
        if not target.is_dir() or not any(target.iterdir()):
            return
        if not state.exists():
            raise UserError(
                f"{target} is not empty, and holds no interrupted conversion; name another folder, "
                "or remove this one"
            )
        found = read_json_object(state)
        other = [
            f"{key} was {str(found.get(key))[:80]} and is {value}"
            for key, value in self.inputs.items()
            if found.get(key) != value
        ]
        if other:
            raise UserError(
                f"{target} holds an interrupted conversion of something else: {'; '.join(other)}. "
                "Repeat its command to go on, name another folder, or remove this one"
            )

    def run(self, target: Path, on_tensor: Callable[[], None] = lambda: None) -> Summary:
        """Writes what is missing in the folder. on_tensor: called once for each tensor.

        Raises UserError as `check_target` does, and for a source that changes meanwhile; OSError.
        """
        self.check_target(target)
        target.mkdir(parents=True, exist_ok=True)
        write_json(target / STATE, self.inputs)
        for part in target.glob(".*.part"):  # of a run that was killed while it wrote
            part.unlink()
        num_kept = 0
        for shard in self.shards:
            path = target / shard.name
            if shard.is_whole(path, self.metadata):
                num_kept += 1
                for _ in shard.arrays:
                    on_tensor()
            else:
                write_stored(path, shard.arrays, self.metadata, on_tensor)
        total = sum(shard.num_bytes for shard in self.shards)
        write_index(target / INDEX, {shard.name: shard.arrays for shard in self.shards}, total)
        copy_companions(self.source, target)
        write_json(target / "config.json", self._config_values())
        (target / STATE).unlink()
        sync_folder(target)
        return Summary(self.num_tensors, total, len(self.shards), num_kept)

    def _config_values(self) -> dict[str, Any]:
        to_hugging_face = self.options.layout == "hf"
        unfused = FUSED if self.checkpoint.is_paddle and to_hugging_face else ()
        values = {k: v for k, v in self.config.values.items() if k not in (*PARALLEL, *unfused)}
        if self.checkpoint.is_paddle == to_hugging_face:
            values = (as_hugging_face_config if to_hugging_face else as_paddle_config)(values)
        dtype = self.options.dtype or values.get("dtype") or values.get("torch_dtype")
        own = "torch_dtype" if to_hugging_face else "dtype"
        known = [key for key in ("dtype", "torch_dtype") if key in values]
        if dtype is None or (self.options.dtype is None and own in known):
            return values
        return values | dict.fromkeys({*known, own}, dtype)


def _shards(arrays: Mapping[str, StoredArray], max_bytes: int) -> Iterator[Shard]:
    """Consecutive tensors by shard, each of `max_bytes` or one tensor."""
    names = list(arrays)
    shards = shards_of(map(num_bytes, arrays.values()), max_bytes)
    for number, shard in enumerate(shards):
        group = {names[place]: arrays[names[place]] for place in shard}
        yield Shard(shard_name(number, len(shards)), group)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MB", "1GiB", "4096". Raises UserError."""
    units = {"": 1, "B": 1}
    for power, letter in enumerate("KMGT", 1):
        units[f"{letter}B"], units[f"{letter}IB"] = 1000**power, 1024**power
    digits = text.rstrip("KMGTIBkmgtib ")
    unit = text[len(digits) :].strip().upper()
    try:
        value = float(digits) * units[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 1 <= value < 2**63:
        raise UserError(
            f"--max_shard_size {text[:40]!r} is no size (allowed: a number with KB, MB, GB, TB, "
            "KiB, MiB, GiB, TiB or nothing behind it: 5GB)"
        )
    return int(value)
