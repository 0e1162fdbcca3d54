"""Passes of a tower over pictures: their bytes cross to the device, rows come to lie in a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.device import library
from predict.device.place import tensor_at, tensors_at
from predict.engine.pictures import Encode
from predict.images.placed import Picture
from predict.loading.platform import Platform
from predict.nn.tower import Encoder, encoding
from predict.nn.vision import TowerInputs

if TYPE_CHECKING:
    from paddle import Tensor

# Makes the rows of pictures, those of each level [C, W] added to the list: it stops in between, by
# layers at most.
Passes = Callable[[Sequence[Picture], "list[Tensor]", "int | None"], Iterator[None]]


def encoder_of(
    tower: Encoder, table: Any, dtype: str, platform: Platform, batch_invariant: bool = False
) -> Encode:
    """What makes rows of pictures in a table.

    table: [rows * levels, H]: what a row and its taps have is one behind the other.
    batch_invariant: on a GPU, the same bits alone and packed.
    """
    passes = passes_of(tower, dtype, platform, batch_invariant)
    return writing(passes, table, platform, len(tower.spec.mergers))


def passes_of(tower: Encoder, dtype: str, platform: Platform, batch_invariant: bool) -> Passes:
    """What makes rows of pictures. See encoder_of."""
    is_fixed = batch_invariant and platform.gpu is not None
    alone = library.require().batch_invariant if is_fixed else nullcontext
    ops, place = platform.backend, platform.place

    def passes(
        pictures: Sequence[Picture], made: list[Tensor], max_layers: int | None = None
    ) -> Iterator[None]:
        import paddle

        def first(given: TowerInputs, width: int) -> Any:
            return _cut(pictures, given.order, (ops, place), width, dtype)

        grids = [each.grid for each in pictures for _ in range(each.num_tiles)]
        steps = encoding(tower, ops, first, grids, dtype, made, place, max_layers)
        while True:
            with paddle.no_grad(), alone():  # which end where others run in between
                if next(steps, steps) is steps:
                    return
            yield

    return passes


def writing(passes: Passes, table: Any, platform: Platform, levels: int) -> Encode:
    """What makes rows by `passes`, and writes them to a table. See encoder_of."""
    ops, place = platform.backend, platform.place

    def write(
        pictures: Sequence[Picture],
        rows: Sequence[npt.NDArray[np.int32]],
        max_layers: int | None = None,
    ) -> Iterator[None]:
        import paddle

        made = list[Any]()
        yield from passes(pictures, made, max_layers)
        with paddle.no_grad():
            for level, part in enumerate(made):
                numbers = np.concatenate(rows) * levels + level
                ops.put_rows(table, tensor_at(numbers.astype(np.int32), place), part)

    return write


def _cut(
    pictures: Sequence[Picture],
    order: npt.NDArray[np.int64],
    device: tuple[ModuleType, Any],
    width: int,
    dtype: str,
) -> Any:
    """Patches [P, width] of pictures, cells in `order`: bytes cross to the device alone."""
    (ops, place), pixels = device, pictures[0].pixels
    origins, strides, first = list[Any](), list[Any](), 0
    for each in pictures:
        own, size = pixels.origins(each.grid), each.values.size // each.num_tiles
        for _ in range(each.num_tiles):
            origins.append(own + first)
            strides.append(np.full(len(own), each.grid[1] * pixels.patch_size))
            first += size

    def ordered(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int32]:
        cells = np.concatenate(parts).reshape(len(order), -1)
        return cells[order].reshape(-1).astype(np.int32)

    flat = [each.values.reshape(-1) for each in pictures]
    values = flat[0] if len(flat) == 1 else np.concatenate(flat)
    places = tensors_at([ordered(origins), ordered(strides)], place)
    sizes = pixels.patch_size, width
    return ops.cut_patches(tensor_at(values, place), *places, sizes, pixels.scaling, dtype)
