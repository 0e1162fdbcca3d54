"""Pixels of towers that take a square out of a picture's middle: CLIP's way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from predict.errors import UserError, quoted
from predict.images.pixels import Pixels, areas_of

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True)
class CroppedPixels(Pixels):
    """The shorter side becomes `shortest_edge`; of that the middle `side` x `side`. See Pixels."""

    side: int = 336
    shortest_edge: int = 336
    do_center_crop: bool = True

    OF_FAMILY: ClassVar[tuple[str, ...]] = ("layout", "patch_size", "merge_size")
    SHARED: ClassVar[tuple[str, ...]] = ("side",)
    NOT_DONE: ClassVar[tuple[str, ...]] = ("do_pad",)  # to a square, ahead of all

    def __post_init__(self) -> None:
        if not self.do_center_crop or not self.do_resize or self.shortest_edge < self.side:
            raise UserError(
                "preprocessor_config.json: pictures are resized and cut to a square (allowed: "
                f"do_resize and do_center_crop true, a shortest_edge of {self.side} or more; got "
                f"{self.do_resize}, {self.do_center_crop}, {self.shortest_edge})"
            )

    def size(self, height: int, width: int) -> tuple[int, int]:
        return self.side, self.side

    def resized(self, image: Image) -> npt.NDArray[np.uint8]:
        short, long = sorted((image.height, image.width))
        longer = int(self.shortest_edge * long / short)
        height, width = self.shortest_edge, longer
        if image.height > image.width:
            height, width = longer, self.shortest_edge
        whole = self._sized(image, (height, width))
        top, left = (height - self.side) // 2, (width - self.side) // 2
        return self.whole_patches(whole[top : top + self.side, left : left + self.side])

    def of_size(self, size: Any, where: str) -> dict[str, Any]:
        if isinstance(size, int) and not isinstance(size, bool):
            return {"shortest_edge": size}
        return areas_of(size, {"shortest_edge": "shortest_edge"}, where)

    def of_key(self, key: str, value: Any, where: str) -> dict[str, Any]:
        if key != "crop_size":
            return super().of_key(key, value, where)
        sides = value if isinstance(value, dict) else {"height": value, "width": value}
        if {*sides} != {"height", "width"} or sides["height"] != sides["width"]:
            raise UserError(f"{where}: crop_size is {quoted(value)} (allowed: a square)")
        return {"side": sides["height"]}
