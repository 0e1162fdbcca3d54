"""Pixels of towers that take pictures of one size."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from predict.errors import UserError, quoted, unknown_key
from predict.images.pixels import UNREAD, Pixels, areas_of

if TYPE_CHECKING:
    from PIL.Image import Image

HALVES = (0.5, 0.5, 0.5)  # SigLIP's mean and deviation
BILINEAR = 2  # of Pillow's numbers


@dataclass(frozen=True, kw_only=True)
class FixedPixels(Pixels):
    """Pictures are resized to height and width, whatever their shape. See Pixels.

    Pan and scan (Gemma 3): of a picture whose sides differ by pan_and_scan_min_ratio_to_activate or
    more, crops along the longer one are pictures, too.
    """

    height: int = 896
    width: int = 896
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256  # pixels
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2

    tiles_apart: ClassVar[bool] = True
    OF_FAMILY: ClassVar[tuple[str, ...]] = ("layout", "patch_size", "merge_size")
    SHARED: ClassVar[tuple[str, ...]] = ("height", "width")
    UNREAD: ClassVar[tuple[str, ...]] = (*UNREAD, "do_center_crop", "crop_size")
    NOT_DONE: ClassVar[tuple[str, ...]] = ("do_center_crop", "do_pad")

    def changed(self, options: Mapping[str, Any], where: str) -> FixedPixels:
        """With do_pan_and_scan. Raises UserError for other options."""
        for key, value in options.items():
            if key != "do_pan_and_scan":
                raise unknown_key(f"{where}: options of pictures", key, ["do_pan_and_scan"])
            if not isinstance(value, bool):
                raise UserError(f"{where}: {key} is {quoted(value)} (allowed: true, false)")
        return replace(self, **options)

    def size(self, height: int, width: int) -> tuple[int, int]:
        if not self.do_resize and (height, width) != (self.height, self.width):
            raise UserError(
                f"a picture has {width} x {height} pixels, and do_resize is false (allowed: "
                f"{self.width} x {self.height})"
            )
        return self.height, self.width

    def num_tiles(self, height: int, width: int) -> int:
        """The picture, and its crops."""
        return 1 + self._num_crops(height, width)

    def _num_crops(self, height: int, width: int) -> int:
        longer, shorter = max(height, width), min(height, width)
        if not self.do_pan_and_scan or longer / shorter < self.pan_and_scan_min_ratio_to_activate:
            return 0
        least = self.pan_and_scan_min_crop_size
        count = min(math.floor(longer / shorter + 0.5), math.floor(longer / least))
        count = min(max(2, count), self.pan_and_scan_max_num_crops)
        return 0 if min(math.ceil(longer / count), shorter) < least else count

    def resized(self, image: Image) -> npt.NDArray[np.uint8]:
        height, width = image.height, image.width
        size = self.size(height, width)
        parts, count = [image], self._num_crops(height, width)
        for index in range(count):
            if width >= height:
                step = math.ceil(width / count)
                box = (index * step, 0, min((index + 1) * step, width), height)
            else:
                step = math.ceil(height / count)
                box = (0, index * step, width, min((index + 1) * step, height))
            parts.append(image.crop(box))
        return self.whole_patches(np.stack([self._sized(part, size) for part in parts]))

    def of_size(self, size: Any, where: str) -> dict[str, Any]:
        return areas_of(size, {"height": "height", "width": "width"}, where)
