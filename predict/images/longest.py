"""Pixels of towers that take pictures of any shape up to a longest side: Pixtral's way.

A picture is never made larger, but for sides that become multiples of a merged cell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from predict.errors import UserError
from predict.images.pixels import UNREAD, Pixels, areas_of


@dataclass(frozen=True, kw_only=True)
class LongestPixels(Pixels):
    """See Pixels."""

    max_height: int = 1024
    max_width: int = 1024

    OF_FAMILY: ClassVar[tuple[str, ...]] = ("layout", "patch_size", "merge_size")
    # The sides of patches are the processor's, see check_processor.
    UNREAD: ClassVar[tuple[str, ...]] = (*UNREAD, "do_center_crop", "crop_size", "patch_size")
    NOT_DONE: ClassVar[tuple[str, ...]] = ("do_center_crop",)  # padding is of batches

    def size(self, height: int, width: int) -> tuple[int, int]:
        factor = self.patch_size * self.merge_size
        if not self.do_resize:
            if height % factor or width % factor:
                raise UserError(
                    f"a picture has {width} x {height} pixels, and do_resize is false (allowed: "
                    f"sides that are multiples of {factor})"
                )
            return height, width
        ratio = max(height / self.max_height, width / self.max_width)
        if ratio > 1:
            height, width = (max(math.floor(side / ratio), 1) for side in (height, width))
        return -(-height // factor) * factor, -(-width // factor) * factor

    def of_size(self, size: Any, where: str) -> dict[str, Any]:
        names = {"height": "max_height", "width": "max_width", "longest_edge": "longest_edge"}
        given = areas_of(size, names, where)
        longest = given.pop("longest_edge", None)
        return given if longest is None else {"max_height": longest, "max_width": longest}

    def check_processor(self, values: Mapping[str, Any], where: str) -> None:
        own = {"patch_size": self.patch_size, "spatial_merge_size": self.merge_size}
        for key, wanted in own.items():
            if values.get(key, wanted) != wanted:
                raise UserError(
                    f"{where}: {key} is {values[key]!r:.40}, and config.json says {wanted}; they "
                    "do not belong to one model"
                )
