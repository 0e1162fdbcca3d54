"""A tower's weights, and its pass over pictures. See predict.nn.vision."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from predict.device.place import tensor_at, tensors_at
from predict.nn.blocks import Linear, NormWeights, normed
from predict.nn.cache_formats import DENSE, CacheTensor
from predict.nn.decoder import Axes, Decoder, Layer
from predict.nn.inputs import LayerCache, StepInputs, fields_with
from predict.nn.vision import (
    BLOCK_SIZE,
    Merger,
    TowerInputs,
    VisionSpec,
    in_cells,
    resampled,
    tower_inputs,
    windows_of,
)

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True, slots=True)
class MergerWeights:
    """Weights of a merger."""

    merger: Merger
    norm: NormWeights | None
    products: tuple[Linear, ...]


class KeptPositions:
    """Learned positions of the grids that came last, on the device: made on the host in float32.

    Making them takes the host longer than all else of a pass, and pages are often of one size.
    """

    def __init__(self) -> None:
        self._of: OrderedDict[tuple[tuple[int, int], str], Tensor] = OrderedDict()

    def of(
        self,
        spec: VisionSpec,
        table: npt.NDArray[np.float32],
        grids: Sequence[tuple[int, int]],
        dtype: str,
        place: Any,
    ) -> Tensor:
        """[P, W] what is added to patches, in the order of the pass. table: see Tower.learned."""
        import paddle

        assert spec.learned is not None
        for grid in {*grids} - {grid for grid, kind in self._of if kind == dtype}:
            values = in_cells(resampled(table, grid, spec.learned.method), spec.merge)
            order, _ = windows_of(*spec.cells(grid), spec.window)
            made = _uploaded(values, order, spec.hidden_size, dtype, place)
            self._of[grid, dtype] = made
        parts = [self._of[grid, dtype] for grid in grids]
        for grid in grids:
            self._of.move_to_end((grid, dtype))
        while sum(rows * columns for (rows, columns), _ in self._of) > KEPT_PATCHES:
            self._of.popitem(last=False)
        return parts[0] if len(parts) == 1 else paddle.concat(parts)


@dataclass(frozen=True, slots=True)
class Tower:
    """All weights of a tower."""

    spec: VisionSpec
    patches: Linear  # from a patch's values to the width
    layers: tuple[Layer, ...]
    mergers: tuple[MergerWeights, ...]  # the last one, then those of the taps
    first_norm: NormWeights | None = None
    last_norm: NormWeights | None = None
    # Learned positions [side, side, W] with the biases of patches; on the host, where they are
    # resampled in float32.
    learned: npt.NDArray[np.float32] | None = None
    class_row: Tensor | None = None  # [1, W] the class token with its position
    kept: dict[str, Any] = field(default_factory=dict)  # by backend, its kept_layers()
    positions: KeptPositions = field(default_factory=KeptPositions)

    @property
    def width(self) -> int:
        """See Encoder."""
        return self.patches.in_features

    def run(
        self,
        ops: ModuleType,
        given: PassInputs,
        cache: LayerCache,
        rows: list[Tensor],
        max_layers: int | None,
    ) -> Iterator[None]:
        """See Encoder: it stops ahead of the layers, and behind each run of `max_layers`."""
        if ops.__name__ not in self.kept:
            self.kept[ops.__name__] = ops.kept_layers()
        return passing(ops, self, given, cache, rows, max_layers, self.kept[ops.__name__])


def head_dim_of(spec: VisionSpec) -> int:
    """Values of a head of a tower's attention."""
    return int(spec.layers[0][0].head_dim)  # type: ignore[attr-defined]


KEPT_PATCHES = 1 << 14  # whose learned positions stay on the device


class PassInputs(NamedTuple):
    """What a pass reads besides weights, on the device. P patches, T tokens, C merged cells."""

    patches: Tensor  # [P, width] in the order of the pass
    back: Tensor  # [C] int32, of each cell in the order of reading its place in the pass
    rope: Tensor  # [P, head_dim] float32, a row of the rotary table for each patch
    whole: StepInputs  # of layers that see whole pictures
    windows: StepInputs  # of the others
    learned: Tensor | None = None  # [P, W] what is added to patches
    tokens: Tensor | None = None  # [T] int32, the patch of each token; -1: a class token
    own: Tensor | None = None  # [P] int32, the token of each patch


# Makes the patches [P, width] of a pass, in its order: zeros behind their values.
First = Callable[[TowerInputs, int], "Tensor"]


class Encoder(Protocol):
    """A tower that makes rows of pictures: a `Tower`, or an exported one."""

    @property
    def spec(self) -> VisionSpec:
        """Its shapes."""

    @property
    def width(self) -> int:
        """Values of a patch, zeros behind them included."""

    @property
    def learned(self) -> npt.NDArray[np.float32] | None:
        """Positions [side, side, W]; see Tower."""

    @property
    def positions(self) -> KeptPositions:
        """Those of grids that came lately."""

    def run(
        self,
        ops: ModuleType,
        given: PassInputs,
        cache: LayerCache,
        rows: list[Tensor],
        max_layers: int | None,
    ) -> Iterator[None]:
        """A pass behind `pass_inputs`. See encoding."""


def encoding(
    tower: Encoder,
    ops: ModuleType,
    first: First,
    grids: Sequence[tuple[int, int]],
    dtype: str,
    rows: list[Tensor],
    place: Any = None,
    max_layers: int | None = None,
) -> Iterator[None]:
    """A pass over pictures of grids of patches, which stops in between.

    At its end it adds the pictures' rows [C, out_size] to `rows`, then those of each tap.
    """
    given, cache = pass_inputs(tower, first, grids, dtype, place)
    yield from tower.run(ops, given, cache, rows, max_layers)


def encode(
    ops: ModuleType,
    tower: Encoder,
    patches: npt.NDArray[np.float32],
    grids: Sequence[tuple[int, int]],
    dtype: str,
    place: Any = None,
) -> Tensor:
    """Rows [C, row_size] of pictures, one behind the other, cells in the order of reading.

    patches: [P, values] in the order of merged cells. grids: of each picture its rows and columns
    of patches. A row has the values that taps add behind its own.
    """
    import paddle

    rows: list[Tensor] = []

    def first(given: TowerInputs, width: int) -> Tensor:
        return _uploaded(patches, given.order, width, dtype, place)

    for _ in encoding(tower, ops, first, grids, dtype, rows, place):
        pass
    return rows[0] if len(rows) == 1 else paddle.concat(rows, axis=1)


def pass_inputs(
    tower: Encoder,
    first: First,
    grids: Sequence[tuple[int, int]],
    dtype: str,
    place: Any = None,
) -> tuple[PassInputs, LayerCache]:
    """What a pass over pictures reads, and the keys and values that its layers take turns with."""
    given = tower_inputs(tower.spec, grids, head_dim_of(tower.spec))
    patches = first(given, tower.width)
    learned = tokens = own = None
    if tower.learned is not None:
        learned = tower.positions.of(tower.spec, tower.learned, grids, dtype, place)
    ways = [given.whole, *([] if given.windows is None else [given.windows])]
    arrays = [np.argsort(given.order).astype(np.int32)]
    if given.patches is not None:
        arrays += [given.patches, np.flatnonzero(given.patches >= 0).astype(np.int32)]
    names = [field.name for field in fields_with(["prefix_lens"]) if not field.on_host]
    arrays += [getattr(way, name) for way in ways for name in names]
    back, *left = tensors_at(arrays, place)
    if given.patches is not None:
        tokens, own, *left = left
    tensors = iter(left)
    inputs = [
        way._replace(
            max_lens=tensor_at(way.max_lens, None),
            **{name: next(tensors) for name in names},
        )
        for way in ways
    ]
    return PassInputs(
        *(patches, back, tensor_at(given.rope, place), inputs[0], inputs[-1]),
        *(learned, tokens, own),
    ), _scratch(tower.spec, given.num_blocks, dtype)


def passing(
    ops: ModuleType,
    tower: Tower,
    given: PassInputs,
    cache: LayerCache,
    rows: list[Tensor],
    max_layers: int | None = None,
    run_layers: Callable[..., tuple[Tensor, list[Tensor]]] | None = None,
) -> Iterator[None]:
    """A pass, which stops ahead of the layers, and behind each run of at most `max_layers`.

    At its end it adds the pictures' rows [C, out_size] to `rows`, then those of each tap.
    run_layers: in place of the backend's `layers`.
    """
    spec, run_layers = tower.spec, run_layers or ops.layers
    hidden = ops.linear(given.patches, tower.patches)
    if given.learned is not None:
        hidden = ops.add(hidden, given.learned)
    if given.tokens is not None:
        hidden = ops.take_or(hidden, given.tokens, tower.class_row)
    hidden = normed(ops, hidden, tower.first_norm, spec.first_norm)
    yield
    made: dict[int, list[Tensor]] = {-1: []}
    for part, sees_all in parts_of(spec, max_layers or len(spec.layers)):
        layers = tower.layers[part.start : part.stop]
        inputs = given.whole if sees_all else given.windows
        ropes = (given.rope,)
        hidden, written = run_layers(hidden, layers, [cache] * len(layers), ropes, inputs)
        cache = tuple(written[-len(cache) :])  # the same memory: a program sees the order by it
        for tap, weights in zip(spec.taps, tower.mergers[1:], strict=True):
            if tap.layer == part.stop - 1:
                made.setdefault(tap.layer, []).append(_merged(ops, spec, weights, hidden))
        yield
    if given.own is not None:
        hidden = ops.take(hidden, given.own)
    hidden = normed(ops, hidden, tower.last_norm, spec.last_norm)
    taps = [made[tap.layer].pop(0) for tap in spec.taps]
    merged = [_merged(ops, spec, tower.mergers[0], hidden), *taps]
    rows += [ops.take(each, given.back) for each in merged]


def _uploaded(
    values: npt.NDArray[np.float32],
    order: npt.NDArray[np.int64],
    width: int,
    dtype: str,
    place: Any,
) -> Tensor:
    """Values of patches [P, N], cells in `order`, as a tensor [P, width]."""
    import paddle

    cells, size = values.reshape(len(order), -1, values.shape[1]), values.shape[1]
    ordered = cells if (order[:-1] < order[1:]).all() else cells[order]
    if width > size:
        ordered = np.pad(ordered, ((0, 0), (0, 0), (0, width - size)))
    tensor = paddle.to_tensor(ordered.reshape(-1, width), place=paddle.CPUPlace()).astype(dtype)
    return tensor if place is None else tensor._copy_to(place, True)


def parts_of(spec: VisionSpec, most: int) -> Iterator[tuple[range, bool]]:
    """Layers that run together, `most` or up to the next tap, and whether they see all."""
    ends = {tap.layer for tap in spec.taps}
    first, count = 0, len(spec.layers)
    sees_all = [not spec.window or index in spec.whole_layers for index in range(count)]
    for index in range(count):
        is_last = index + 1 == count or sees_all[index + 1] != sees_all[index]
        if is_last or index in ends or index + 1 - first == most:
            yield range(first, index + 1), sees_all[index]
            first = index + 1


def _merged(ops: ModuleType, spec: VisionSpec, weights: MergerWeights, hidden: Tensor) -> Tensor:
    import paddle

    merger = weights.merger
    if not merger.norms_cells:
        hidden = normed(ops, hidden, weights.norm, merger.norm)
    if merger.pools:
        parts = paddle.reshape(hidden, [-1, spec.merge**2, spec.hidden_size])
        cells = parts.astype("float32").mean(1).astype(hidden.dtype)
    else:
        cells = paddle.reshape(hidden, [-1, spec.cell_values])
    if merger.norms_cells:
        cells = normed(ops, cells, weights.norm, merger.norm)
    for product, linear in zip(merger.products, weights.products, strict=True):
        cells = ops.linear(cells, linear)
        if product.activation is not None:
            cells = ops.activate(cells, product.activation)
    return cells


def scratch_of(spec: VisionSpec, num_blocks: int | None, dtype: str) -> tuple[CacheTensor, ...]:
    """Keys and values of a pass, which layers take turns with. num_blocks None: any number."""
    return DENSE.tensors(spec.layers[0][0].cache_rows, num_blocks, BLOCK_SIZE, dtype)


def _scratch(spec: VisionSpec, num_blocks: int, dtype: str) -> LayerCache:
    import paddle

    made = scratch_of(spec, num_blocks, dtype)
    return tuple(paddle.empty(list(each.shape), each.dtype) for each in made)


def with_images(decoder: Decoder, spec: VisionSpec, table: Tensor, num_places: int) -> Decoder:
    """The text's decoder, which reads rows of pictures [rows, row_size] from `table`.

    num_places: tokens of a step, whose rotary rows lie behind those of positions.
    """
    tables = tables_of(spec, table)
    if not spec.axes:
        return with_tables(decoder, spec, tables)
    rope = decoder.ropes[0]
    return with_tables(decoder, spec, tables, with_room(rope, num_places), rope.shape[0])


def tables_of(spec: VisionSpec, table: Tensor) -> list[Tensor]:
    """[rows * levels, H] each: the rows that embeddings take, and those added behind layers.

    Row r of level n is row r * levels + n of the same memory.
    """
    levels = len(spec.mergers)
    parts = table.view([table.shape[0] * levels, spec.out_size])
    return [parts._slice(level, parts.shape[0]) for level in range(levels)]


def with_room(rope: Tensor, num_places: int) -> Tensor:
    """A rotary table with rows behind its own, for tokens of pictures in a step."""
    import paddle

    more = paddle.zeros([num_places, rope.shape[1]], rope.dtype)
    return paddle.concat([rope, more])


def with_tables(
    decoder: Decoder,
    spec: VisionSpec,
    tables: Sequence[Tensor],
    rope: Tensor | None = None,
    first: int = 0,
) -> Decoder:
    """The text's decoder, which reads `tables_of` pictures.

    rope: the first rotary table, with room; None: pictures have the positions of text. first: the
    row of it that a step's first token gets.
    """
    made = replace(
        decoder,
        embedding=replace(decoder.embedding, images=tables[0]),
        added_images=tuple(tables[1:]),
        pictures_see=spec.sees_itself,
    )
    if rope is None:
        return made
    return replace(made, ropes=(rope, *decoder.ropes[1:]), axes=Axes(spec.axes, first))
