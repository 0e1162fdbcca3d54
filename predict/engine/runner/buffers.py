"""A step's inputs on their way to a GPU: arrays in pinned memory, and tensors that they fill."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from predict.device import cuda
from predict.device.devices import Device
from predict.nn.inputs import FIELDS, Field, StepInputs
from predict.ops.columns import TABLES

if TYPE_CHECKING:
    from paddle import Tensor

ALIGNMENT = 16  # bytes


class Piece(NamedTuple):
    """An array of a buffer, with a tensor of the same dtype and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def room(self) -> int:
        """Elements that it takes, so that the next piece is aligned."""
        of = ALIGNMENT // np.dtype(self.dtype).itemsize
        return -(-math.prod(self.shape) // of) * of


class Slab(NamedTuple):
    """Memory of a buffer's pieces of one dtype, flat: pinned, and on the device."""

    host: npt.NDArray[Any]
    device: Tensor


def slab_sizes(pieces: Sequence[Piece]) -> dict[str, int]:
    """Elements of the slabs of pieces, by dtype."""
    sizes: Counter[str] = Counter()
    for piece in pieces:
        sizes[piece.dtype] += piece.room
    return sizes


class StepBuffer:
    """Inputs of one step: an array and a tensor per piece.

    Pieces: the network's fields that are on the device (see FieldLayout), then TABLES, then the
    plan of a step that follows drafts.
    """

    def __init__(
        self, pieces: Sequence[Piece], slabs: Mapping[str, Slab], tables: slice = slice(0, 0)
    ):
        """slabs: by dtype, large enough. tables: which pieces are TABLES."""
        self._tables = tables
        self.arrays: list[npt.NDArray[Any]] = []
        self.tensors: list[Tensor] = []
        starts = dict.fromkeys(slabs, 0)
        for piece in pieces:
            dtype, shape = piece
            host, device = slabs[dtype]
            start, size = starts[dtype], math.prod(shape)
            self.arrays.append(host[start : start + size].reshape(shape))
            tensor = device[start : start + size]
            if len(shape) > 1:
                tensor = tensor.reshape(list(shape))
            # An empty tensor (of a prompt's chunk that samples nothing) has no address.
            offset = start * host.itemsize
            if size > 0 and tensor.data_ptr() != device.data_ptr() + offset:
                raise RuntimeError("Paddle copied a slice that has to share its tensor's memory")
            self.tensors.append(tensor)
            starts[dtype] += piece.room
        # Kept, since copies are by address.
        self._slabs = [slab for slab in slabs.values() if len(slab.host)]
        self._copies = [
            (device.data_ptr(), host.ctypes.data, host.nbytes) for host, device in self._slabs
        ]

    @cached_property
    def columns(self) -> list[dict[str, npt.NDArray[Any]]]:
        """The arrays of TABLES, column by column."""
        pairs = zip(TABLES, self.arrays[self._tables], strict=True)
        return [table.views(array) for table, array in pairs]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(num_bytes for _, _, num_bytes in self._copies)

    def clear(self) -> None:
        """Fills the arrays with zeros."""
        for host, _ in self._slabs:
            host[:] = 0

    def upload(self, stream: int) -> None:
        """Queues the copies of all arrays to their tensors."""
        for device, host, num_bytes in self._copies:
            cuda.copy_bytes(device, host, num_bytes, stream)


class PinnedMemory:
    """Pinned memory for one step's arrays at a time, grown where a step needs more."""

    def __init__(self, device: Device):
        self._device = device
        self._hosts: dict[str, npt.NDArray[Any]] = {}  # by dtype

    def slabs(self, pieces: Sequence[Piece]) -> dict[str, Slab]:
        """Slabs for pieces: the memory of the last ones, and new tensors."""
        import paddle

        place, slabs = self._device.place(), {}
        for dtype, size in slab_sizes(pieces).items():
            if len(self._hosts.get(dtype, ())) < size:
                self._hosts[dtype] = cuda.pinned([2 * size], dtype)
            device = paddle.empty([size], dtype, device=place)
            slabs[dtype] = Slab(self._hosts[dtype][:size], device)
        return slabs


def table_pieces(num_rows: int) -> list[Piece]:
    """The choice's inputs: a table of each of TABLES."""
    return [Piece("int32", table.shape(num_rows)) for table in TABLES]


class GraphShape(NamedTuple):
    """The room and the kind of a step, and of the graph that runs it."""

    num_seqs: int
    num_tokens: int
    max_span: int  # tokens of a request
    all_rows: bool  # logits of every token; else of one per request
    adjusted: bool = False  # logits are changed by penalties or bans
    raw: bool = False  # the unchanged logits are kept
    verified: bool = False  # TopP + window verification accepts drafts
    guided: bool = False  # masks and the choice have their own graph
    follows: bool = False  # continues a verification (see Follower)
    adapted: bool = False  # requests have adapters
    chooses: bool = True  # tokens are drawn, in it or by the graph of the choice
    taps: tuple[str, ...] = ()  # hidden states that it returns
    pictured: bool = False  # tokens of pictures are read; no graph runs that
    apart: bool = False  # each rank has its own tokens' logits, and the largest of all is wanted

    @property
    def returns(self) -> bool:
        """Whether its logits are kept. Rows of drafts are many: their memory serves others too."""
        return self.max_span == 1 or self.guided


class FieldLayout:
    """The order of a network's fields in a StepBuffer, before the choice's inputs.

    device: the fields on the device, in order, with their indices in StepInputs. places: indices
    in the buffer, by name. of_tokens, of_seqs, of_blocks: place, index and padding of fields with a
    value per token, per request, and per block of a request.
    """

    def __init__(self, fields: Sequence[Field]):
        rows = [(index, field) for index, field in enumerate(FIELDS) if field in fields]
        self.device = [(index, field) for index, field in rows if not field.on_host]
        self.num_fields = len(self.device)
        self.tables = slice(self.num_fields, self.num_fields + len(TABLES))  # in the buffer
        self.places = {field.name: place for place, (_, field) in enumerate(self.device)}
        self.of_tokens = self._begin_with("T")
        self.of_seqs = self._begin_with("B")
        self.of_blocks = self._begin_with("B", by_block=True)
        # Of the tensors of the buffer and, behind them, max_lens and None.
        sources = {**self.places, "max_lens": self.num_fields}
        none = self.num_fields + 1
        self._in_order = operator.itemgetter(*(sources.get(each.name, none) for each in FIELDS))

    def _begin_with(self, dim: str, by_block: bool = False) -> list[tuple[int, int, int]]:
        return [
            (place, index, field.padding)
            for place, (index, field) in enumerate(self.device)
            if field.shape[0] == dim and ("M" in field.shape) == by_block
        ]

    def pieces(self, dims: Mapping[str, int]) -> list[Piece]:
        """The fields on the device, for sizes of the named dimensions."""
        return [Piece(field.dtype, field.sized(dims)) for _, field in self.device]

    def inputs(self, buffer: StepBuffer, max_lens: Tensor) -> StepInputs:
        """A buffer's tensors as StepInputs."""
        return StepInputs(*self._in_order([*buffer.tensors[: self.num_fields], max_lens, None]))

    def write(
        self, arrays: Sequence[npt.NDArray[Any]], inputs: StepInputs, shape: GraphShape
    ) -> None:
        """Fills a graph's arrays with a step's inputs and padding."""
        num_seqs, num_tokens = len(inputs.context_lens), len(inputs.token_ids)
        for count, room, fields in (
            (num_tokens, shape.num_tokens, self.of_tokens),
            (num_seqs, shape.num_seqs, self.of_seqs),
        ):
            for place, index, padding in fields:
                if inputs[index] is None:  # of a step without pictures: not read
                    continue
                array = arrays[place]
                array[:count] = inputs[index]
                if count < room:
                    array[count:] = padding
        for place, index, padding in self.of_blocks:
            array, values = arrays[place], inputs[index]
            array[:num_seqs, : values.shape[1]] = values
            if num_seqs < shape.num_seqs:
                array[num_seqs:, 0] = padding  # padding requests have one token
        if shape.max_span > 1:  # padding requests have no tokens
            borders = arrays[self.places["cu_seqlens_q"]]
            borders[: num_seqs + 1] = inputs.cu_seqlens_q
            borders[num_seqs + 1 :] = num_tokens
            if not shape.all_rows:
                rows = arrays[self.places["logit_indices"]]
                rows[:num_seqs] = inputs.logit_indices
                rows[num_seqs:] = 0
