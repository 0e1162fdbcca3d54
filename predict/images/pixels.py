"""How pictures become patches: what all kinds of processors share, and the files that say it.

Kinds are frozen dataclasses of predict.images: areas, fixed. Values are scaled, normalised, and cut
in the order of merged cells: [rows / m, columns / m, m, m] patches of [channels, p, p].
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from predict.errors import UserError, one_of, quoted, unknown_key
from predict.images.limits import AREA, OPTIONS
from predict.system.files import read_json_object
from predict.system.ranges import Range

if TYPE_CHECKING:
    from PIL.Image import Image

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
BICUBIC = 3  # of Pillow's numbers
# Keys that say nothing here: names of classes, how tensors are batched, what no picture has.
UNREAD = (
    *("auto_map", "data_format", "device", "disable_grouping", "do_pad"),
    *("default_to_square", "feature_extractor_type", "input_data_format"),
    *("image_processor_type", "pad_size", "processor_class", "return_tensors", "max_frames"),
    *("image_seq_length", "size_divisor", "do_convert_rgb", "fps", "min_frames"),
)
# How a picture's tokens stand in a prompt: with places of their own in time, rows and columns, as
# text, or as text with a token behind each row.
Layout = Literal["axes", "text", "rows"]
Kind = TypeVar("Kind", bound="Pixels")


@dataclass(frozen=True)
class Placeholder:
    """What stands for a picture in a prompt, before and after its size is known."""

    token: int
    mark: int = (
        -1
    )  # the token that stands for it where `token` does not: see predict.images.written
    end: int = -1  # behind a picture's own tokens that are put in place of a mark
    before: tuple[int, ...] = ()  # tokens that are put around its own
    behind: tuple[int, ...] = ()
    around_names: tuple[str, str] | None = None  # what a tokenizer calls them
    # Behind each row of cells, and in place of the last of these, where the kind's layout is
    # "rows": ids, and what a tokenizer calls them, which comes first.
    row_end: int = -1
    last: int = -1
    row_end_name: str = ""
    last_name: str = ""


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """How pictures become patches; what preprocessor_config.json says of it."""

    patch_size: int = 14
    merge_size: int = 2
    resample: int = BICUBIC
    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    layout: Layout = "axes"

    # Whether tiles are pictures of their own in a prompt, the first one the whole.
    tiles_apart: ClassVar[bool] = False
    OF_FAMILY: ClassVar[tuple[str, ...]] = ("layout",)  # fields that no file says
    SHARED: ClassVar[tuple[str, ...]] = ()  # fields that are the tower's, too
    UNREAD: ClassVar[tuple[str, ...]] = UNREAD
    NOT_DONE: ClassVar[tuple[str, ...]] = ()  # of these: what transformers does where it is true

    @property
    def digest(self) -> bytes:
        """Of all options."""
        return hashlib.blake2b(repr(self).encode(), digest_size=32).digest()

    def changed(self: Kind, options: Mapping[str, Any], where: str) -> Kind:
        """With other options. Raises UserError for those that the kind has not, or that cross."""
        for key in options:
            raise UserError(
                f"{where}: {key} is given, and this model's pictures have one size (allowed: none "
                f"of {', '.join(OPTIONS)})"
            )
        return self

    def low(self: Kind) -> Kind:
        """As a picture of low detail is made; itself where all pictures have one size."""
        return self

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Height and width to resize a picture to. Raises UserError for one that is not taken."""
        raise NotImplementedError

    def num_tiles(self, height: int, width: int) -> int:
        """Parts of that size that a picture becomes."""
        return 1

    def num_tokens(self, cells: tuple[int, int], num_tiles: int = 1) -> int:
        """Tokens of a picture of so many rows and columns of merged cells, in each tile."""
        rows, columns = cells
        return num_tiles * rows * columns + rows * (self.layout == "rows")

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of a picture resized to (height, width)."""
        return size[0] // self.patch_size, size[1] // self.patch_size

    def resized(self, image: Image) -> npt.NDArray[np.uint8]:
        """[height, width, 3] of an RGB picture, or [tiles, height, width, 3]."""
        return self._sized(image, self.size(image.height, image.width))

    def _sized(self, image: Image, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
        from PIL.Image import Resampling

        height, width = size
        if (image.width, image.height) != (width, height):
            image = image.resize((width, height), Resampling(self.resample))
        return np.asarray(image, np.uint8)

    def whole_patches(self, values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """[..., height, width, 3] without what lies behind the last whole patch."""
        *_, height, width, _ = values.shape
        rows, columns = (side * self.patch_size for side in self.grid((height, width)))
        return np.ascontiguousarray(values[..., :rows, :columns, :])

    @property
    def scaling(self) -> tuple[float, list[float], list[float]]:
        """Factor, mean and standard deviation: (value * factor - mean) / std of each channel."""
        factor = self.rescale_factor if self.do_rescale else 1.0
        if not self.do_normalize:
            return factor, [0.0] * 3, [1.0] * 3
        return factor, list(self.image_mean), list(self.image_std)

    def origins(self, grid: tuple[int, int]) -> npt.NDArray[np.int64]:
        """[patches] bytes of a resized picture ahead of each patch's first pixel."""
        merge, side = self.merge_size, self.patch_size
        y, x = np.indices(grid)
        cut = 3 * side * (y * grid[1] * side + x)
        cut = cut.reshape(grid[0] // merge, merge, grid[1] // merge, merge)
        return cut.transpose(0, 2, 1, 3).reshape(-1)

    def patches(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """[patches, 3 * patch_size^2] of resized pixels, one frame of them; of tiles in order."""
        *_, height, width, _ = pixels.shape
        rows, columns = self.grid((height, width))
        merge, side = self.merge_size, self.patch_size
        values = pixels.astype(np.float32)
        if self.do_rescale:
            values = values * np.float32(self.rescale_factor)
        if self.do_normalize:
            mean, std = (np.array(v, np.float32) for v in (self.image_mean, self.image_std))
            values = (values - mean) / std
        cut = values.reshape(-1, rows // merge, merge, side, columns // merge, merge, side, 3)
        cut = cut.transpose(0, 1, 4, 2, 5, 7, 3, 6)
        return np.ascontiguousarray(cut.reshape(-1, 3 * side * side))

    def of_key(self, key: str, value: Any, where: str) -> dict[str, Any]:
        """The fields that another key of a file says."""
        return {key: value}

    def of_size(self, size: Any, where: str) -> dict[str, Any]:
        """The fields that a file's `size` says. Raises UserError for another form of it."""
        raise NotImplementedError

    def check_processor(self, values: Mapping[str, Any], where: str) -> None:
        """Raises UserError for what processor_config.json says of patches, where that is another.

        values: of the file. Kinds whose processors say nothing of patches take anything.
        """

    def check_fits(self, found: Pixels, where: str) -> None:
        """Raises UserError where what a folder says is not what the tower, as this says, takes."""
        for key in self.SHARED:
            own, said = getattr(self, key), getattr(found, key)
            if own != said:
                raise UserError(
                    f"{where}: preprocessor_config.json says {key} {said}, and config.json {own}; "
                    "they do not belong to one model"
                )


def read_pixels(directory: Path, default: Kind) -> Kind:
    """What a model's folder says of its pictures. default: of the family, for what it leaves out.

    processor_config.json comes first where it says something of pictures, as in transformers.
    Raises UserError for a file that is broken, and for what is not done here.
    """
    whole, own = directory / "processor_config.json", directory / "preprocessor_config.json"
    values = read_json_object(whole) if whole.exists() else {}
    default.check_processor(values, str(whole))
    if "image_processor" in values:
        if not isinstance(values["image_processor"], dict):
            what = quoted(values["image_processor"])
            raise UserError(f"{whole}: image_processor is {what} (allowed: an object)")
        return _from_values(dict(values["image_processor"]), default, str(whole))
    return _from_values(dict(read_json_object(own)), default, str(own)) if own.exists() else default


def areas_of(size: Any, names: Mapping[str, str], where: str) -> dict[str, Any]:
    """The fields that an object of sizes says. names: of the fields, by key."""
    if not isinstance(size, Mapping):
        raise UserError(
            f"{where}: size is {quoted(size)} (allowed: an object of {', '.join(names)})"
        )
    given: dict[str, Any] = {}
    for key, value in size.items():
        if key not in names and key not in names.values():
            raise unknown_key(f"{where}: size", key, list(names))
        if value is not None:
            given[names.get(str(key), str(key))] = value
    return given


def _from_values(values: dict[str, Any], default: Kind, where: str) -> Kind:
    size = values.pop("size", None) or {}
    given = default.of_size(size, where)
    names = [each.name for each in fields(default) if each.name not in default.OF_FAMILY]
    for key, value in values.items():
        if key in default.NOT_DONE and value:
            raise UserError(
                f"{where}: {key} is {quoted(value)}, which is not done with this model's pictures "
                "yet (allowed: false)"
            )
        if key in default.UNREAD or value is None:
            continue
        said = default.of_key(key, value, where)
        if not {*said} <= {*names}:
            raise unknown_key(where, key, names)
        given |= said
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
            is_good = value in (AREA if key in OPTIONS else Range(1, 1 << 13))
        if not is_good or (key == "image_std" and 0 in value):
            raise UserError(f"{where}: {key} is {quoted(value)} (allowed: such as {own})")
    return replace(default, **given)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
