"""A tower's weights, and its pass over pictures. See predict.nn.vision."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device.place import tensor_at
from predict.nn.blocks import Linear, NormWeights, normed
from predict.nn.cache_formats import DENSE
from predict.nn.decoder import Axes, Decoder, Layer
from predict.nn.inputs import LayerCache, to_tensors
from predict.nn.vision import (
    BLOCK_SIZE,
    Merger,
    TowerInputs,
    VisionSpec,
    in_cells,
    resampled,
    tower_inputs,
)

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True, slots=True)
class MergerWeights:
    """Weights of a merger."""

    merger: Merger
    norm: NormWeights | None
    products: tuple[Linear, ...]


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

    @property
    def head_dim(self) -> int:
        """Values of a head of its attention."""
        return int(self.layers[0][0].block.head_dim)  # type: ignore[attr-defined]


def encode(
    ops: ModuleType,
    tower: Tower,
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

    for _ in encoding(ops, tower, first, grids, dtype, rows, place):
        pass
    return rows[0] if len(rows) == 1 else paddle.concat(rows, axis=1)


def encoding(
    ops: ModuleType,
    tower: Tower,
    first: Callable[[TowerInputs, int], Tensor],
    grids: Sequence[tuple[int, int]],
    dtype: str,
    rows: list[Tensor],
    place: Any = None,
    max_layers: int | None = None,
) -> Iterator[None]:
    """A pass as `encode` makes it, which stops ahead of the layers, and behind each run of them.

    A run has at most `max_layers`.

    first(inputs, width): the patches [P, width] in the order of the pass, zeros behind their
    values. At its end it adds the pictures' rows [C, out_size] to `rows`, then those of each tap.
    """
    spec = tower.spec
    given = tower_inputs(spec, grids, tower.head_dim)

    hidden = ops.linear(first(given, tower.patches.in_features), tower.patches)
    if tower.learned is not None:
        learned = _positions(tower, grids)
        added = _uploaded(learned, given.order, spec.hidden_size, dtype, place)
        hidden = ops.add(hidden, added)
    if given.patches is not None:
        hidden = ops.take_or(hidden, tensor_at(given.patches, place), tower.class_row)
    hidden = normed(ops, hidden, tower.first_norm, spec.first_norm)
    ropes = (tensor_at(given.rope, place),)
    cache = _scratch(tower, given.num_blocks, dtype, place)
    whole = to_tensors(given.whole, place)
    windows = whole if given.windows is None else to_tensors(given.windows, place)
    yield
    made: dict[int, list[Tensor]] = {-1: []}
    for part, sees_all in _parts(spec, max_layers or len(spec.layers)):
        layers = tower.layers[part.start : part.stop]
        inputs = whole if sees_all else windows
        hidden, _ = ops.layers(hidden, layers, [cache] * len(layers), ropes, inputs)
        for tap, weights in zip(spec.taps, tower.mergers[1:], strict=True):
            if tap.layer == part.stop - 1:
                made.setdefault(tap.layer, []).append(_merged(ops, spec, weights, hidden))
        yield
    if given.patches is not None:
        own = np.flatnonzero(given.patches >= 0).astype(np.int32)
        hidden = ops.take(hidden, tensor_at(own, place))
    hidden = normed(ops, hidden, tower.last_norm, spec.last_norm)
    taps = [made[tap.layer].pop(0) for tap in spec.taps]
    back = tensor_at(np.argsort(given.order).astype(np.int32), place)
    merged = [_merged(ops, spec, tower.mergers[0], hidden), *taps]
    rows += [ops.take(each, back) for each in merged]


def _uploaded(
    values: npt.NDArray[np.float32],
    order: npt.NDArray[np.int64],
    width: int,
    dtype: str,
    place: Any,
) -> Tensor:
    """Values of patches [P, N], cells in `order`, as a tensor [P, width]."""
    import paddle

    cells = values.reshape(len(order), -1, values.shape[1])
    ordered = np.zeros((*cells.shape[:2], width), np.float32)
    ordered[..., : values.shape[1]] = cells[order]
    tensor = paddle.to_tensor(ordered.reshape(-1, width), place=paddle.CPUPlace()).astype(dtype)
    return tensor if place is None else tensor._copy_to(place, True)


def _parts(spec: VisionSpec, most: int) -> Iterator[tuple[range, bool]]:
    """Layers that run together, `most` or up to the next tap, and whether they see all."""
    ends = {tap.layer for tap in spec.taps}
    first, count = 0, len(spec.layers)
    sees_all = [not spec.window or index in spec.whole_layers for index in range(count)]
    for index in range(count):
        is_last = index + 1 == count or sees_all[index + 1] != sees_all[index]
        if is_last or index in ends or index + 1 - first == most:
            yield range(first, index + 1), sees_all[index]
            first = index + 1


def _positions(tower: Tower, grids: Sequence[tuple[int, int]]) -> npt.NDArray[np.float32]:
    """[P, W] what is added to patches, in the order of merged cells."""
    spec, table = tower.spec, tower.learned
    assert table is not None
    assert spec.learned is not None
    return np.concatenate(
        [in_cells(resampled(table, grid, spec.learned.method), spec.merge) for grid in grids]
    )


def _merged(ops: ModuleType, spec: VisionSpec, weights: MergerWeights, hidden: Tensor) -> Tensor:
    import paddle

    merger = weights.merger
    if not merger.norms_cells:
        hidden = normed(ops, hidden, weights.norm, merger.norm)
    num_cells = hidden.shape[0] // spec.merge**2
    if merger.pools:
        parts = paddle.reshape(hidden, [num_cells, spec.merge**2, spec.hidden_size])
        cells = parts.astype("float32").mean(1).astype(hidden.dtype)
    else:
        cells = paddle.reshape(hidden, [num_cells, spec.cell_values])
    if merger.norms_cells:
        cells = normed(ops, cells, weights.norm, merger.norm)
    for product, linear in zip(merger.products, weights.products, strict=True):
        cells = ops.linear(cells, linear)
        if product.activation is not None:
            cells = ops.activate(cells, product.activation)
    return cells


def _scratch(tower: Tower, num_blocks: int, dtype: str, place: Any) -> LayerCache:
    """Keys and values of a pass, which layers take turns with."""
    import paddle

    kept = tower.spec.layers[0][0].cache_rows
    made = DENSE.tensors(kept, num_blocks, BLOCK_SIZE, dtype)
    return tuple(paddle.empty(list(each.shape), each.dtype) for each in made)


def with_images(decoder: Decoder, spec: VisionSpec, table: Tensor, num_places: int) -> Decoder:
    """The text's decoder, which reads rows of pictures [rows, row_size] from `table`.

    num_places: tokens of a step, whose rotary rows lie behind those of positions.
    """
    import paddle

    # Row r of level n is row r * levels + n of the same memory.
    levels = len(spec.mergers)
    parts = table.view([table.shape[0] * levels, spec.out_size])
    tables = [parts._slice(level, parts.shape[0]) for level in range(levels)]
    made = replace(
        decoder,
        embedding=replace(decoder.embedding, images=tables[0]),
        added_images=tuple(tables[1:]),
        pictures_see=spec.sees_itself,
    )
    if not spec.axes:
        return made
    rope, *others = decoder.ropes
    more = paddle.zeros([num_places, rope.shape[1]], rope.dtype)
    return replace(
        made, ropes=(paddle.concat([rope, more]), *others), axes=Axes(spec.axes, rope.shape[0])
    )
