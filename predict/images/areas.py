"""Pixels of towers that take pictures of any shape within an area: Qwen's way, and PaddleOCR-VL's.

Sides become multiples of a merged cell, the area between min_pixels and max_pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from predict.errors import UserError
from predict.images.limits import LOW_PIXELS, MAX_SIDES, check_options
from predict.images.pixels import UNREAD, Pixels, areas_of


@dataclass(frozen=True, kw_only=True)
class AreaPixels(Pixels):
    """See Pixels."""

    temporal_patch_size: int = 2  # a still picture is repeated so often
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    grows_sides: bool = False  # a side shorter than a merged cell's becomes that first

    OF_FAMILY: ClassVar[tuple[str, ...]] = ("layout", "grows_sides")
    SHARED: ClassVar[tuple[str, ...]] = ("patch_size", "merge_size", "temporal_patch_size")
    UNREAD: ClassVar[tuple[str, ...]] = (*UNREAD, "do_center_crop", "crop_size")

    @property
    def factor(self) -> int:
        """Pixels of a side of a merged cell."""
        return self.patch_size * self.merge_size

    def changed(self, options: Mapping[str, Any], where: str) -> AreaPixels:
        """With other options. Raises UserError for others than OPTIONS, and where they cross."""
        check_options(options, where)
        made = replace(self, **options)
        if made.min_pixels > made.max_pixels:
            raise UserError(
                f"{where}: min_pixels {made.min_pixels} is more than max_pixels {made.max_pixels}"
            )
        return made

    def low(self) -> AreaPixels:
        """With the area of a picture of low detail, where that is less."""
        most = max(min(self.max_pixels, LOW_PIXELS), self.min_pixels)
        return replace(self, max_pixels=most)

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to resize a picture to. Raises UserError where it is too narrow."""
        factor = self.factor
        if max(height, width) > MAX_SIDES * min(height, width):
            raise UserError(
                f"a picture has {width} x {height} pixels (allowed: sides up to {MAX_SIDES} to 1)"
            )
        if not self.do_resize:
            if height % factor or width % factor:
                raise UserError(
                    f"a picture has {width} x {height} pixels, and do_resize is false (allowed: "
                    f"sides that are multiples of {factor})"
                )
            return height, width
        if self.grows_sides:  # as PaddleOCR-VL
            if height < factor:
                height, width = factor, round(width * factor / height)
            if width < factor:
                height, width = round(height * factor / width), factor
        near = [round(side / factor) * factor for side in (height, width)]
        if near[0] * near[1] > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            sides = (math.floor(side / shrink / factor) for side in (height, width))
            return tuple(max(factor, side * factor) for side in sides)  # type: ignore[return-value]
        if near[0] * near[1] < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            return tuple(  # type: ignore[return-value]
                math.ceil(side * grow / factor) * factor for side in (height, width)
            )
        return near[0], near[1]

    def of_size(self, size: Any, where: str) -> dict[str, Any]:
        names = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # areas, all of them
        return areas_of(size, names, where)
