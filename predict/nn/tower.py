"""A tower's weights, and its pass over one picture. See predict.nn.vision."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.nn.blocks import Linear, NormWeights, normed
from predict.nn.cache_formats import DENSE
from predict.nn.decoder import Axes, Decoder, Layer
from predict.nn.inputs import LayerCache, to_tensors
from predict.nn.vision import BLOCK_SIZE, VisionSpec, tower_inputs

if TYPE_CHECKING:
    from paddle import Tensor


@dataclass(frozen=True, slots=True)
class Tower:
    """All weights of a tower."""

    spec: VisionSpec
    patches: Linear  # from a patch's values to the width
    layers: tuple[Layer, ...]
    norm: NormWeights | None  # of the merger
    up: Linear
    down: Linear

    @property
    def head_dim(self) -> int:
        """Values of a head of its attention."""
        return int(self.layers[0][0].block.head_dim)  # type: ignore[attr-defined]


def encode(
    ops: ModuleType,
    tower: Tower,
    patches: npt.NDArray[np.float32],
    grid: tuple[int, int],
    dtype: str,
    place: Any = None,
) -> Tensor:
    """Rows [C, out_size] of a picture, cells in the order of reading.

    patches: [P, values] in the order of merged cells. grid: rows and columns of patches.
    """
    import paddle

    spec, per_cell = tower.spec, tower.spec.merge**2
    given = tower_inputs(spec, grid, tower.head_dim)
    ordered = patches.reshape(len(given.order), per_cell, -1)[given.order]
    x = paddle.to_tensor(ordered.reshape(len(patches), -1), place=place).astype(dtype)
    hidden = ops.linear(x, tower.patches)
    ropes = (paddle.to_tensor(given.rope, place=place),)
    cache = _scratch(tower, given.num_blocks, dtype, place)
    whole = to_tensors(given.whole, place)
    windows = whole if given.windows is None else to_tensors(given.windows, place)
    is_whole = [not spec.window or index in spec.whole_layers for index in range(len(spec.layers))]
    for sees_all, run in groupby(range(len(is_whole)), lambda index: is_whole[index]):
        layers = [tower.layers[index] for index in run]
        inputs = whole if sees_all else windows
        hidden, _ = ops.layers(hidden, layers, [cache] * len(layers), ropes, inputs)
    return _merged(ops, tower, hidden, given.order)


def _merged(ops: ModuleType, tower: Tower, hidden: Tensor, order: npt.NDArray[np.int64]) -> Tensor:
    import paddle

    merger = tower.spec.merger
    hidden = normed(ops, hidden, tower.norm, merger.norm)
    cells = paddle.reshape(hidden, [len(order), tower.spec.cell_values])
    inner = ops.activate(ops.linear(cells, tower.up), merger.activation)
    rows = ops.linear(inner, tower.down)
    back = paddle.to_tensor(np.argsort(order).astype(np.int32), place=rows.place)
    return ops.take(rows, back)


def _scratch(tower: Tower, num_blocks: int, dtype: str, place: Any) -> LayerCache:
    """Keys and values of a pass, which layers take turns with."""
    import paddle

    kept = tower.spec.layers[0][0].cache_rows
    made = DENSE.tensors(kept, num_blocks, BLOCK_SIZE, dtype)
    return tuple(paddle.empty(list(each.shape), each.dtype) for each in made)


def with_images(decoder: Decoder, spec: VisionSpec, table: Tensor, num_places: int) -> Decoder:
    """The text's decoder, which reads rows of pictures [rows, H] from `table`.

    num_places: tokens of a step, whose rotary rows lie behind those of positions.
    """
    import paddle

    rope, *others = decoder.ropes
    first = rope.shape[0]
    more = paddle.zeros([num_places, rope.shape[1]], rope.dtype)
    return replace(
        decoder,
        embedding=replace(decoder.embedding, images=table),
        ropes=(paddle.concat([rope, more]), *others),
        axes=Axes(spec.axes, first),
    )
