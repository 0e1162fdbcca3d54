"""StepInputs: everything that one decoder step reads besides weights and caches, from one table.

Dims: T tokens, B requests, L logit rows, M blocks per request, R pages of the largest adapter. The
dynamic call, the exported program's InputSpecs and the static feeds are all made from `FIELDS`, so
they cannot disagree. Optional fields are None for networks that do not read them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, get_type_hints

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paddle.static import InputSpec

    from paddle import Tensor

# The cache tensors of one layer: key and value, or one of latents; then the scales of each, where
# the format has them. Empty for a layer that keeps nothing (DecoderSpec.kept).
LayerCache: TypeAlias = "tuple[Tensor, ...]"


# Rows of pages that a request's adapter has, by the linears that most kinds of blocks change with
# them: see predict.nn.blocks.Block.adapted.
ADAPTED = ("qkv", "out", "gate_up", "down")


@dataclass(frozen=True)
class Field:
    """One row of the table: a tensor's dtype, symbolic shape and meaning."""

    dtype: str
    shape: tuple[str | int, ...]
    meaning: str
    padding: int = 0  # of tokens and requests that a step has room for and does not have
    on_host: bool = False  # always in CPU memory
    optional: bool = False
    name: str = ""  # of the attribute

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape, with these sizes of named dimensions."""
        return tuple(dim if isinstance(dim, int) else sizes[dim] for dim in self.shape)


class StepInputs(NamedTuple):
    """The tensors (or, before upload, NumPy arrays) of a step: the table, a row each."""

    token_ids: Annotated[Any, Field("int32", ("T",), "spans, request after request")]
    positions: Annotated[
        Any, Field("int32", ("T",), "place in the request, or what predict.nn.places gives")
    ]
    slot_mapping: Annotated[
        Any, Field("int32", ("T",), "block_id * block_size + offset; -1 writes nothing", padding=-1)
    ]
    cu_seqlens_q: Annotated[Any, Field("int32", ("B+1",), "span borders in T")]
    context_lens: Annotated[
        Any, Field("int32", ("B",), "tokens visible in the cache after this step", padding=1)
    ]
    block_tables: Annotated[Any, Field("int32", ("B", "M"), "block ids, -1 past the end")]
    logit_indices: Annotated[Any, Field("int32", ("L",), "rows of T to project to logits")]
    max_lens: Annotated[Any, Field("int32", (5,), "what max_lens_of says", padding=1, on_host=True)]
    # The first of the optional ones: the operator of blocks finds them there.
    adapter_ids: Annotated[
        Any,
        Field("int32", ("T",), "row of adapter_pages; -1: no adapter", padding=-1, optional=True),
    ] = None
    adapter_pages: Annotated[
        Any,
        Field(
            *("int32", ("B", len(ADAPTED), "R")),
            "pages of the request's adapter for each linear, -1 behind them",
            padding=-1,
            optional=True,
        ),
    ] = None
    block_positions: Annotated[
        Any, Field("int32", ("T",), "positions in the second dimension", optional=True)
    ] = None
    prefix_lens: Annotated[
        Any, Field("int32", ("B",), "first tokens, which all tokens see", optional=True)
    ] = None
    image_rows: Annotated[
        Any,
        Field(
            *("int32", ("T",), "row of the pictures' table in place of the token's; -1: its own"),
            padding=-1,
            optional=True,
        ),
    ] = None
    image_places: Annotated[
        Any,
        Field("int32", ("T", 3), "of tokens with image_rows: time, row, column", optional=True),
    ] = None
    # The last ones: the operator of blocks finds them there.
    state_src: Annotated[
        Any, Field("int32", ("B",), "slot of the state before; -1: zeros", -1, optional=True)
    ] = None
    state_dst: Annotated[
        Any, Field("int32", ("B",), "slot to write it to; -1: nowhere", -1, optional=True)
    ] = None

    @property
    def row_kind(self) -> int:
        """The RowKind of NumPy inputs."""
        return int(self.max_lens[4])

    @property
    def of_blocks(self) -> list[Any]:
        """The fields that the operator of blocks reads, in its order."""
        others = ("block_positions", "image_rows", "image_places")
        return self._replace(**dict.fromkeys(others)).given

    @property
    def given(self) -> list[Any]:
        """The fields that are not None, in order."""
        return [value for value in self if value is not None]


class RowKind(IntEnum):
    """Which tokens the rows `logit_indices` are: the tag of a step's rows. StepRows in C++."""

    LISTED = 0  # any
    LAST = 1  # the last token of each request
    ALL = 2  # every token, in order
    NONE = 3  # no logits are wanted; the rows are those of LAST


# Spans of this many tokens are long: on a GPU latent attention expands their contexts' latents to
# keys and values (csrc/cuda/attention/latent/expanded.h), which pays off from this length on.
LONG_SPAN = 128


def max_lens_of(
    lengths: Sequence[int], context_lens: Sequence[int], rows: RowKind = RowKind.LISTED
) -> npt.NDArray[np.int32]:
    """[5]: longest span, longest context, longest short span, contexts of long spans, `rows`.

    The contexts are summed; 0 where no span is short, or none long. Takes one span or more.
    """
    longest = max(lengths)
    if longest < LONG_SPAN:
        return np.array((longest, max(context_lens), longest, 0, rows), np.int32)
    short = max((length for length in lengths if length < LONG_SPAN), default=0)
    pairs = zip(lengths, context_lens, strict=True)
    in_long = sum(context for length, context in pairs if length >= LONG_SPAN)
    return np.array((longest, max(context_lens), short, in_long, rows), np.int32)


FIELDS: tuple[Field, ...] = tuple(
    replace(hint.__metadata__[0], name=name)
    for name, hint in get_type_hints(StepInputs, include_extras=True).items()
)


def fields_with(optional: Collection[str] = ()) -> tuple[Field, ...]:
    """The rows of `FIELDS` that a network reads: the required ones, and the named optional ones."""
    return tuple(field for field in FIELDS if not field.optional or field.name in optional)


def of_fields(fields: Sequence[Field], values: Sequence[Any]) -> StepInputs:
    """Inputs with these values of these fields."""
    given = {field.name: value for field, value in zip(fields, values, strict=True)}
    return StepInputs(**given)


def to_tensors(inputs: StepInputs, place: Any) -> StepInputs:
    """Copies NumPy inputs to `place`, or to the CPU for fields that stay there."""
    import paddle

    cpu = paddle.CPUPlace()
    return StepInputs(
        *(
            None
            if array is None
            else paddle.to_tensor(
                np.ascontiguousarray(array, dtype=field.dtype),
                place=cpu if field.on_host else place,
            )
            for field, array in zip(FIELDS, inputs, strict=True)
        )
    )


class HostTensors:
    """CPU tensors of `FIELDS`, refilled for each step, in a tenth of the time of new ones."""

    def __init__(self, fields: Sequence[Field] = fields_with()) -> None:
        import paddle

        self._place = paddle.CPUPlace()
        self._tensors = to_tensors(empty_example(fields=fields), self._place)
        self._stores = [
            (field.dtype, index, tensor.get_tensor())
            for index, (field, tensor) in enumerate(zip(FIELDS, self._tensors, strict=True))
            if tensor is not None
        ]

    def filled(self, inputs: StepInputs) -> StepInputs:
        """The tensors, with values and shapes of NumPy `inputs`; valid until the next call."""
        tensors = self._tensors
        for dtype, index, store in self._stores:
            if inputs[index] is None:  # of a step without pictures
                tensors = tensors._replace(**{FIELDS[index].name: None})
                continue
            store.set(np.ascontiguousarray(inputs[index], dtype=dtype), self._place)
        return tensors


def input_specs(fields: Sequence[Field] = fields_with()) -> list[InputSpec]:
    """InputSpecs of `fields` for paddle.jit; every named dimension is dynamic."""
    from paddle.static import InputSpec

    return [
        InputSpec([d if isinstance(d, int) else None for d in f.shape], f.dtype, f.name)
        for f in fields
    ]


def empty_example(
    block_tables_width: int = 1, fields: Sequence[Field] = fields_with()
) -> StepInputs:
    """NumPy inputs of the smallest legal step: one token, one request, slot -1."""
    sizes = {"T": 1, "B": 1, "B+1": 2, "L": 1, "M": block_tables_width, "R": 1}
    arrays = [np.full(field.sized(sizes), field.padding, field.dtype) for field in fields]
    return of_fields(fields, arrays)._replace(
        cu_seqlens_q=np.arange(2, dtype=np.int32), max_lens=max_lens_of([1], [1], RowKind.ALL)
    )


def cache_tensors(caches: Sequence[Tensor], of_layers: Sequence[int]) -> list[LayerCache]:
    """Groups tensors by layer. of_layers: tensors of each layer."""
    ends = [*accumulate(of_layers)]
    return [tuple(caches[end - count : end]) for end, count in zip(ends, of_layers, strict=True)]


def bucket_size(num_seqs: int) -> int:
    """Rows of the graph that runs a batch: the next power of two, or multiple of 32 from 32 on."""
    if num_seqs <= 32:
        return int(1 << max(num_seqs - 1, 0).bit_length())
    return -(-num_seqs // 32) * 32
