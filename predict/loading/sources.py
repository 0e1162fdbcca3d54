"""Where a network's tensors come from: a checkpoint, or random numbers."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from predict.config.model import DTYPE_BYTES
from predict.device.place import place_tensor, to_float32
from predict.errors import UserError
from predict.loading.arrays import FLOAT_DTYPES, listed
from predict.loading.matrices import round_weight, taken
from predict.nn.kinds.experts import ExpertBlock
from predict.nn.shares import Ranges
from predict.nn.spec import DecoderSpec
from predict.nn.weights import WeightNames
from predict.system.notes import LOG

if TYPE_CHECKING:
    from paddle import Tensor
    from predict.device.devices import Device
    from predict.loading.checkpoint import Checkpoint
    from predict.schemes import Quantized, Scheme


PART_BYTES = 16 << 20  # of a matrix, in memory beside a rank's part of it
MAX_HOLES = 8  # experts that a message names
DRAFTING = ".eh_proj."  # in the name of what a layer that drafts begins with


def check_sizes(spec: DecoderSpec, names: WeightNames, checkpoint: Checkpoint) -> None:
    """Raises UserError where config.json's main sizes are not those of the checkpoint's tensors.

    Before a plan is made of them: the plan's own check would list thousands of names, one by one.
    """
    # A layer behind the last one that does not draft is one that config.json leaves out.
    entries = [name for name in checkpoint.tensors if DRAFTING in name]
    others = {part for part in names.drafting if not any(part in name for name in entries)}
    unread = [part for part in names.unread if part not in others]
    read = [n for n in checkpoint.tensors if not any(part in n for part in unread)]
    found = _numbers(names.layer, read)
    embedding = checkpoint.tensors.get(names.embedding)
    problems = []
    if len(found) != spec.num_layers:
        problems.append(
            f"num_hidden_layers is {spec.num_layers}, and the tensors are those of {len(found)} "
            "layers"
        )
    counts = {block.router.num_experts for block in spec.blocks_of(ExpertBlock)}
    experts = _numbers(f"{names.layer}{names.expert_down[0]}", read, "{expert}")
    if counts and experts and counts != {len(experts)}:
        # A hole has a name; a shorter row of experts is another model's.
        numbers = [str(number) for number in range(max(counts))]
        holes = [number for number in numbers if number not in experts]
        is_shorter = numbers[-1] not in experts
        without = "" if is_shorter or not holes else f", without {', '.join(holes[:MAX_HOLES])}"
        problems.append(
            f"the number of experts is {', '.join(map(str, sorted(counts)))}, and the tensors are "
            f"those of {len(experts)}{without}"
        )
    wanted = (spec.vocab_size, spec.embedding.width or spec.hidden_size)
    if embedding is not None and embedding.shape != wanted:
        problems.append(
            f"vocab_size x hidden_size is {list(wanted)}, and {names.embedding} has the shape "
            f"{list(embedding.shape)}"
        )
    if problems:
        raise UserError(
            f"{checkpoint.directory}: the tensors do not fit config.json: {'; '.join(problems)}; "
            "the two do not belong to one model, or the download is not complete"
        )


def with_stored_head(spec: DecoderSpec, names: WeightNames, checkpoint: Checkpoint) -> DecoderSpec:
    """The network, its head no longer the table of tokens where a head is stored that differs.

    As in transformers. One in codes is another one, whatever they stand for.
    """
    head = f"{names.head}.weight"
    stored = [name for name in checkpoint.tensors if name.startswith(f"{names.head}.")]
    if not (spec.tie_word_embeddings and stored and names.embedding in checkpoint.tensors):
        return spec
    if stored == [head] and checkpoint.are_same(head, names.embedding):
        return spec
    LOG.warning(
        f"{checkpoint.directory}: config.json says tie_word_embeddings, and {listed(stored)} is "
        f"stored and differs from {names.embedding}: it is the head, as in transformers; set "
        "tie_word_embeddings false, or take it out of the file"
    )
    return replace(spec, tie_word_embeddings=False)


def _numbers(pattern: str, tensors: Iterable[str], of: str = "{layer}") -> set[str]:
    """What stands for `of` in the names that begin as the pattern does."""
    number = {"{layer}": "[0-9]+", "{expert}": "[0-9]+", of: "([0-9]+)"}
    parts = re.split(r"(\{layer\}|\{expert\})", pattern)
    begin = re.compile("".join(number.get(part, re.escape(part)) for part in parts))
    return {match[1] for match in map(begin.match, tensors) if match}


class WeightSource(Protocol):
    """Gives tensors by name: from a checkpoint, or made up."""

    def vector(self, name: str, size: int) -> npt.NDArray[Any]:
        """[size]."""

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Any:
        """`shape`, the named matrices one below the other; an array, or a tensor in its place."""

    def stored_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Any:
        """As `matrix`, in the dtype of the checkpoint: of it codes are made, where it lies."""

    def stored_bytes(self, names: tuple[str, ...]) -> int:
        """Bytes of a value of that."""

    def host_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        """As `stored_matrix`, always an array."""

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        """[size], the named vectors one after another."""

    def close(self) -> None:
        """Ends reading; what was given stays."""


class CheckpointSource:
    """Weights of a checkpoint, as stored ([out, in], bfloat16 as uint16)."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint

    def vector(self, name: str, size: int) -> npt.NDArray[Any]:
        return self.checkpoint.read_float((name,))

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        return self.checkpoint.read_float(names)

    stored_matrix = host_matrix = matrix

    def part(
        self, names: tuple[str, ...], rows: Ranges | None, columns: Ranges | None
    ) -> npt.NDArray[Any]:
        """Rows and columns of the named matrices, one below the other; None: all.

        No more than those, and some MiB, are in memory at a time.
        """
        found, first = [], 0
        for name in names:
            info = self.checkpoint.in_file(name)
            if info is None or info.dtype not in FLOAT_DTYPES:
                whole = self.checkpoint.read_float(names)
                whole = whole if rows is None else taken(whole, rows)
                return whole if columns is None else taken(whole, columns, axis=1)
            count = info.shape[0]
            most = max(1, PART_BYTES * count // max(info.num_bytes, 1))
            for begin, end in rows or ((0, sum(self._num_rows(name) for name in names)),):
                begin, end = max(begin - first, 0), min(end - first, count)
                for at in range(begin, end, most):
                    values = info.rows(at, min(at + most, end)).read()
                    found.append(values if columns is None else taken(values, columns, axis=1))
            first += count
        dtypes = {values.dtype for values in found}
        return np.concatenate(found if len(dtypes) == 1 else [to_float32(v) for v in found])

    def _num_rows(self, name: str) -> int:
        return self.checkpoint.tensors[name].shape[0]

    def stored_bytes(self, names: tuple[str, ...]) -> int:
        dtypes = {self.checkpoint.tensors[name].dtype for name in names}
        return 2 if dtypes in ({"BF16"}, {"F16"}) else 4  # others become float32

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        return self.checkpoint.read_float(names)

    def close(self) -> None:
        pass


class RandomSource:
    """Seeded random weights of the right shapes, for timing without a checkpoint.

    Values repeat with a long period: drawing billions of normals would take longer than the run.
    """

    PERIOD = (1 << 20) + 7  # odd, so that rows of a power-of-two matrix differ

    def __init__(self, seed: int):
        generator = np.random.default_rng(seed)
        self.values = generator.standard_normal(self.PERIOD, dtype=np.float32)
        self.values *= np.float32(0.02)

    def start(self, names: tuple[str, ...]) -> int:
        """Where the values of these tensors begin: the same, whatever else is read."""
        return zlib.crc32(" ".join(names).encode()) % self.PERIOD

    def vector(self, name: str, size: int) -> npt.NDArray[Any]:
        return np.ones(size, np.float32)

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        return self._rows(names, 0, shape)

    def part(
        self, names: tuple[str, ...], rows: Ranges, columns: Ranges | None, num_columns: int
    ) -> npt.NDArray[Any]:
        """Rows and columns of such a matrix, without the others."""
        ranges = ((begin, (end - begin, num_columns)) for begin, end in rows)
        found = np.concatenate([self._rows(names, begin, shape) for begin, shape in ranges])
        return found if columns is None else taken(found, columns, axis=1)

    def _rows(self, names: tuple[str, ...], begin: int, shape: tuple[int, int]) -> npt.NDArray[Any]:
        """`shape`, of a matrix from row `begin` on."""
        first = (self.start(names) + begin * shape[1]) % self.PERIOD
        return np.resize(np.roll(self.values, -first), shape)

    def stored_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Any:
        return self.matrix(names, shape)

    def stored_bytes(self, names: tuple[str, ...]) -> int:
        return 4

    def host_matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> npt.NDArray[Any]:
        return RandomSource.matrix(self, names, shape)

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        return self.matrix(names, (1, size))[0]

    def close(self) -> None:
        pass

    def quantized(
        self, names: tuple[str, ...], scheme: Scheme, group_size: int, shape: tuple[int, int]
    ) -> Quantized:
        """A linear [N, K] of random codes: some rows are rounded, and repeated to all N."""
        num_rows = min(shape[0], max(1, self.PERIOD // shape[1]))
        sample = scheme.quantize(self.host_matrix(names, (num_rows, shape[1])), group_size)

        def repeated(values: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
            if values is None:
                return None
            rows_per_scale = -(-num_rows // len(values))
            return np.resize(values, (-(-shape[0] // rows_per_scale), *values.shape[1:]))

        return replace(
            sample,
            codes=np.resize(sample.codes, shape),
            scale=repeated(sample.scale),
            zero=repeated(sample.zero),
        )


class DeviceRandomSource(RandomSource):
    """Random weights for a GPU, made there: one pattern goes up, and copies of it fill matrices."""

    PERIOD = (1 << 23) + 9  # odd, so that rows of a power-of-two matrix differ

    def __init__(self, seed: int, dtype: str, device: Device):
        super().__init__(seed)
        self.device = device
        self.dtype = dtype

    @functools.cached_property
    def pattern(self) -> Tensor:
        """The values on the GPU; made when first needed, after the memory was found to suffice."""
        return place_tensor(self.values, self.dtype, self.device.place())

    def matrix(self, names: tuple[str, ...], shape: tuple[int, int]) -> Tensor:
        import paddle
        from predict.device import cuda

        result = paddle.empty(list(shape), self.pattern.dtype)
        cuda.fill_with(result, self.pattern, cuda.current_stream(self.device))
        return result

    def stored_bytes(self, names: tuple[str, ...]) -> int:
        return DTYPE_BYTES[self.dtype]

    def quantized(
        self, names: tuple[str, ...], scheme: Scheme, group_size: int, shape: tuple[int, int]
    ) -> Quantized:
        """A linear [N, K] of random values, rounded where they are."""
        return scheme.quantize(self.matrix(names, shape), group_size, round_weight)

    def biases(self, names: tuple[str, ...], size: int) -> npt.NDArray[Any]:
        start = self.start(names) % (self.PERIOD - size)
        return self.values[start : start + size]
