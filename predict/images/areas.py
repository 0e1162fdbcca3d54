"""Pixels of towers that take pictures of any shape within an area: Qwen's way.

Sides become multiples of a merged cell, the area between min_pixels and max_pixels. Patches are cut
in the order of merged cells: [rows / m, columns / m, m, m], values [channels, p, p].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from predict.errors import UserError, one_of, quoted, unknown_key
from predict.images.limits import AREA, MAX_SIDES, OPTIONS, check_options
from predict.system.files import read_json_object
from predict.system.ranges import Range

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3  # of Pillow's numbers
# Keys that say nothing here: names of classes, how tensors are batched, what no picture has.
UNREAD = (
    *("auto_map", "data_format", "device", "disable_grouping", "do_center_crop", "do_pad"),
    *("crop_size", "default_to_square", "feature_extractor_type", "input_data_format"),
    *("image_processor_type", "pad_size", "processor_class", "return_tensors", "max_frames"),
    *("image_seq_length", "size_divisor", "do_convert_rgb", "fps", "min_frames"),
)


@dataclass(frozen=True)
class AreaPixels:
    """How pictures become patches; what preprocessor_config.json says of it."""

    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2  # a still picture is repeated so often
    min_pixels: int = 56 * 56
    max_pixels: int = 28 * 28 * 1280
    resample: int = BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    grows_sides: bool = False  # a side shorter than a merged cell's becomes that first

    @property
    def factor(self) -> int:
        """Pixels of a side of a merged cell."""
        return self.patch_size * self.merge_size

    @property
    def digest(self) -> bytes:
        """Of all options."""
        return hashlib.blake2b(repr(self).encode(), digest_size=32).digest()

    def changed(self, options: Mapping[str, Any], where: str) -> AreaPixels:
        """With other options. Raises UserError for others than OPTIONS, and where they cross."""
        check_options(options, where)
        made = replace(self, **options)
        if made.min_pixels > made.max_pixels:
            raise UserError(
                f"{where}: min_pixels {made.min_pixels} is more than max_pixels {made.max_pixels}"
            )
        return made

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

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of a picture resized to (height, width)."""
        return size[0] // self.patch_size, size[1] // self.patch_size

    def resized(self, image: Image) -> npt.NDArray[np.uint8]:
        """[height, width, 3] of an RGB picture."""
        from PIL.Image import Resampling

        height, width = self.size(image.height, image.width)
        if (image.width, image.height) != (width, height):
            image = image.resize((width, height), Resampling(self.resample))
        return np.asarray(image, np.uint8)

    def patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """[patches, 3 * patch_size^2] of resized pixels, one frame of them."""
        rows, columns = self.grid(pixels.shape[:2])
        merge, side = self.merge_size, self.patch_size
        values = pixels.astype(np.float32)
        if self.do_rescale:
            values = values * np.float32(self.rescale_factor)
        if self.do_normalize:
            mean, std = (np.array(v, np.float32) for v in (self.image_mean, self.image_std))
            values = (values - mean) / std
        cut = values.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
        cut = cut.transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(cut.reshape(rows * columns, 3 * side * side))


def read_pixels(directory: Path, default: AreaPixels) -> AreaPixels:
    """What a model's folder says of its pictures. default: of the family, for what it leaves out.

    processor_config.json comes first where it says something of pictures, as in transformers.
    Raises UserError for a file that is broken, and for what is not done here.
    """
    whole, own = directory / "processor_config.json", directory / "preprocessor_config.json"
    if whole.exists() and "image_processor" in (values := read_json_object(whole)):
        if not isinstance(values["image_processor"], dict):
            what = quoted(values["image_processor"])
            raise UserError(f"{whole}: image_processor is {what} (allowed: an object)")
        return _from_values(dict(values["image_processor"]), default, str(whole))
    return _from_values(dict(read_json_object(own)), default, str(own)) if own.exists() else default


def _from_values(values: dict[str, Any], default: AreaPixels, where: str) -> AreaPixels:
    size = values.pop("size", None) or {}
    if not isinstance(size, Mapping):
        raise UserError(f"{where}: size is {quoted(size)} (allowed: an object of two areas)")
    areas = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}
    given: dict[str, Any] = {}
    for key, value in size.items():
        if key not in areas and key not in areas.values():
            raise unknown_key(f"{where}: size", key, list(areas))
        if value is not None:
            given[areas.get(str(key), str(key))] = value
    names = [field.name for field in fields(AreaPixels) if field.name != "grows_sides"]
    for key, value in values.items():
        if key in UNREAD or value is None:
            continue
        if key not in names:
            raise unknown_key(where, key, names)
        given[key] = value
    for key, value in given.items():
        own = getattr(default, key)
        if isinstance(own, tuple):
            is_good = isinstance(value, list) and len(value) == 3
            is_good = is_good and all(_is_number(each) for each in value)
            given[key] = tuple(map(float, value)) if is_good else value
        elif isinstance(own, bool):
            is_good = isinstance(value, bool)
        elif isinstance(own, float):
            is_good = _is_number(value)
        elif key == "resample":
            if value not in range(6):
                raise one_of(f"{where}: resample", value, map(str, range(6)))
            is_good = True
        else:
            is_good = value in (AREA if key in OPTIONS else Range(1, 1024))
        if not is_good or (key == "image_std" and 0 in value):
            raise UserError(f"{where}: {key} is {quoted(value)} (allowed: such as {own})")
    return replace(default, **given)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
