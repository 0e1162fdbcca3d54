"""Pixels of towers that take pictures as tiles of one size: InternVL's way.

A picture is resized to a grid of tiles, up to max_patches, whose sides are as near to its own as
can be, and cut; a small one of the whole stands behind several tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from predict.errors import UserError
from predict.images.pixels import UNREAD, Pixels, areas_of

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_TILES = 256


@lru_cache(4096)  # strangers choose the sizes
def grid_of(
    height: int, width: int, tile: tuple[int, int], least: int, most: int
) -> tuple[int, int]:
    """Rows and columns of tiles whose proportions are nearest to a picture's.

    Of several the later one, with more tiles, where the picture has more than half of its pixels.
    """
    grids = [
        (rows, columns)
        for columns in range(1, most + 1)
        for rows in range(1, most + 1)
        if least <= rows * columns <= most
    ]
    best, nearest = (1, 1), float("inf")
    for rows, columns in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        distance = abs(width / height - columns / rows)
        is_large = height * width > 0.5 * tile[0] * tile[1] * rows * columns
        if distance < nearest or (distance == nearest and is_large):
            best, nearest = (rows, columns), distance
    return best


@dataclass(frozen=True, kw_only=True)
class TilePixels(Pixels):
    """See Pixels."""

    height: int = 448
    width: int = 448
    min_patches: int = 1  # tiles
    max_patches: int = 12

    OF_FAMILY: ClassVar[tuple[str, ...]] = ("layout", "patch_size", "merge_size")
    SHARED: ClassVar[tuple[str, ...]] = ("height", "width")
    # InternVL's processor cuts tiles whatever crop_to_patches says.
    UNREAD: ClassVar[tuple[str, ...]] = (*UNREAD, "crop_to_patches", "do_center_crop", "crop_size")

    def __post_init__(self) -> None:
        if not self.min_patches <= self.max_patches <= MOST_TILES:
            raise UserError(
                f"min_patches is {self.min_patches}, and max_patches {self.max_patches} (allowed: "
                f"up to {MOST_TILES}, the first not more than the second)"
            )

    def size(self, height: int, width: int) -> tuple[int, int]:
        return self.height, self.width

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        if self.max_patches == 1:
            return 1, 1
        return grid_of(height, width, (self.height, self.width), self.min_patches, self.max_patches)

    def num_tiles(self, height: int, width: int) -> int:
        rows, columns = self._grid(height, width)
        return rows * columns + (rows * columns > 1)

    def resized(self, image: Image) -> npt.NDArray[np.uint8]:
        rows, columns = self._grid(image.height, image.width)
        tall, wide = self.height, self.width
        whole = self._sized(image, (rows * tall, columns * wide))
        cut = whole.reshape(rows, tall, columns, wide, 3).transpose(0, 2, 1, 3, 4)
        tiles = cut.reshape(rows * columns, tall, wide, 3)
        if len(tiles) > 1:
            tiles = np.concatenate([tiles, self._sized(image, (tall, wide))[None]])
        return self.whole_patches(tiles)

    def of_size(self, size: Any, where: str) -> dict[str, Any]:
        return areas_of(size, {"height": "height", "width": "width"}, where)
