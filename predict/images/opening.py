"""Opening pictures that strangers made: header first, within limits, as RGB.

A picture is a path, bytes, a data URL, an array [H, W], [H, W, 3] or [H, W, 4] of uint8, or PIL's
image. EXIF's orientation is applied, and alpha is laid on white.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from predict.errors import UserError, quoted
from predict.images.fetching import NO_MEDIA, Media
from predict.images.files import file_bytes
from predict.images.limits import MAX_HEAD_READS, MAX_PIXELS, MAX_SCANS, MAX_SIDES

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of a GIF the first frame
ALLOWED = "PNG, JPEG, WebP, GIF, BMP"
STRIP = 256  # rows that are laid on white at once
ORIENTATION = 0x0112  # EXIF's tag


class Opened(NamedTuple):
    """A picture, decoded."""

    image: Image  # RGB
    digest: bytes  # of the file, or of all that an image in memory holds


class Header(NamedTuple):
    """A picture whose header was read and checked."""

    image: Image  # not decoded, but of one in memory
    digest: bytes  # see Opened
    data: bytes | None  # of the file; None of an image in memory


def opened(
    source: Any,
    where: str = "the picture",
    max_pixels: int = MAX_PIXELS,
    check: Callable[[int, int], None] = lambda height, width: None,
) -> Opened:
    """The picture. where: names it in messages. Raises UserError for one that is not taken.

    check(height, width): is asked ahead of decoding, sides as the file has them.
    """
    found = header(source, where, max_pixels, check)
    return Opened(as_rgb(found.image, where), found.digest)


def header(
    source: Any,
    where: str,
    max_pixels: int,
    check: Callable[[int, int], None],
    media: Media = NO_MEDIA,
) -> Header:
    """The picture before it is decoded. See `opened`. media: where addresses may lead."""
    from PIL import Image

    if isinstance(source, np.ndarray):
        source = _of_array(source, where)
    if isinstance(source, Image.Image):
        check_size(source.size, where, max_pixels)
        check(source.height, source.width)
        try:
            return Header(source, _digest_of(source), None)
        except (OSError, SyntaxError, ValueError) as error:  # it reads its file only now
            raise UserError(
                f"{where} cannot be decoded ({quoted(str(error))}); its file is damaged or cut off"
            ) from None
    data, kind = file_bytes(source, where, media)
    digest = hashlib.blake2b(data, digest_size=32).digest()
    # The limit is ours. Not within catch_warnings, which threads may leave in another order.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    file = _Head(data)
    try:
        image = Image.open(file, formats=FORMATS)
    except _LongHeadError:
        raise UserError(
            f"{where} has a header of more parts than {MAX_HEAD_READS} reads take; save it again"
        ) from None
    except Exception as error:
        raise UserError(
            f"{where} is no picture that can be read ({quoted(str(error))}) (allowed: {ALLOWED})"
        ) from None
    file.left = -1  # pixels take as many reads as they are
    form = "JPEG" if image.format == "MPO" else image.format or ""  # a JPEG with others behind it
    if kind and kind.lower().replace("jpg", "jpeg") != f"image/{form}".lower():
        raise UserError(
            f"{where} says that it is {quoted(kind)}, and its bytes are {form}; write what it is"
        )
    if form == "JPEG" and data.count(b"\xff\xda") > MAX_SCANS:  # each goes over all pixels
        raise UserError(f"{where} has more than {MAX_SCANS} scans; save it again")
    if image.tile and image.tile[0][0] == "bmp_rle":  # Pillow decodes it in Python: 5 Mpixel/s
        raise UserError(f"{where} is a BMP of coded runs (allowed: plain ones); save it as PNG")
    check_size(image.size, where, max_pixels)  # ahead of decoding
    check(image.height, image.width)
    return Header(image, digest, data)


class _LongHeadError(Exception):
    """A header has more parts than it may."""


class _Head(BytesIO):
    """A file whose header is read: outside the processes that have limits, part after part."""

    left = MAX_HEAD_READS

    def read(self, size: int | None = -1, /) -> bytes:
        self.left -= 1
        if self.left == 0:
            raise _LongHeadError
        return super().read(size)


def check_size(size: tuple[int, int], where: str, max_pixels: int) -> None:
    """Raises UserError for a picture (width, height) that is too large, or too narrow."""
    width, height = size
    if min(size) < 1 or width * height > max_pixels:
        raise UserError(
            f"{where} has {width} x {height} pixels (allowed: up to {max_pixels} in all); make it "
            "smaller, or raise max_image_pixels"
        )
    if max(size) > MAX_SIDES * min(size):
        raise UserError(
            f"{where} has {width} x {height} pixels (allowed: sides up to {MAX_SIDES} to 1); cut it"
        )


def _of_array(values: np.ndarray[Any, Any], where: str) -> Image:
    from PIL import Image

    is_shape = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))
    if values.dtype != np.uint8 or not is_shape or 0 in values.shape:
        raise UserError(
            f"{where} is an array of {values.dtype}, {list(values.shape)} (allowed: uint8, [H, W], "
            "[H, W, 3] or [H, W, 4])"
        )
    return Image.fromarray(np.ascontiguousarray(values))


def as_rgb(image: Image, where: str) -> Image:
    """The picture upright, its alpha on white. Raises UserError, and MemoryError."""
    from PIL import Image, ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if not image.has_transparency_data:  # a palette's, too
            return image.convert("RGB")
        made = Image.new("RGB", image.size)
        for top in range(0, image.height, STRIP):  # a large picture is not there four times
            strip = image.crop((0, top, image.width, min(top + STRIP, image.height)))
            white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
            laid = Image.alpha_composite(white, strip.convert("RGBA"))
            made.paste(laid.convert("RGB"), (0, top))
        return made
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(
            f"{where} cannot be decoded ({quoted(str(error))}); its file is damaged or cut off"
        ) from None


def _digest_of(image: Image) -> bytes:
    """Of mode, size, palette, transparency, orientation and pixels."""
    digest = hashlib.blake2b(digest_size=32)
    palette = image.getpalette(None) if image.mode in ("P", "PA") else None
    of = image.info.get("transparency"), image.getexif().get(ORIENTATION)
    digest.update(repr((image.mode, image.size, palette, *of)).encode())
    digest.update(image.tobytes())
    return digest.digest()
