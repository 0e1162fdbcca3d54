"""Opening pictures that strangers made: header first, within limits, as RGB.

A picture is a path, bytes, a data URL, an array [H, W], [H, W, 3] or [H, W, 4] of uint8, or PIL's
image. EXIF's orientation is applied, and alpha is laid on white.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from predict.errors import UserError, quoted
from predict.images.limits import MAX_BYTES, MAX_PIXELS, MAX_SIDES
from predict.system.files import open_regular

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # of a GIF the first frame
ALLOWED = "PNG, JPEG, WebP, GIF, BMP"
DATA_URL = re.compile(r"data:([a-zA-Z0-9.+-]+/[a-zA-Z0-9.+-]+)?(;[a-zA-Z0-9=.+-]+)*;base64,")
ORIENTATION = 0x0112  # EXIF's tag


class Opened(NamedTuple):
    """A picture, decoded."""

    image: Image  # RGB
    digest: bytes  # of the file, or of all that an image in memory holds


def opened(source: Any, where: str = "the picture", max_pixels: int = MAX_PIXELS) -> Opened:
    """The picture. where: names it in messages. Raises UserError for one that is not taken."""
    from PIL import Image

    if isinstance(source, np.ndarray):
        source = _of_array(source, where)
    if isinstance(source, Image.Image):
        check_size(source.size, where, max_pixels)
        return Opened(_as_rgb(source, where), _digest_of(source))
    data, kind = file_bytes(source, where)
    digest = hashlib.blake2b(data, digest_size=32).digest()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own about large ones: the limit is ours
            image = Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise UserError(
            f"{where} is no picture that can be read ({quoted(str(error))}) (allowed: {ALLOWED})"
        ) from None
    if kind and kind.lower().replace("jpg", "jpeg") != f"image/{image.format or ''}".lower():
        raise UserError(
            f"{where} says that it is {quoted(kind)}, and its bytes are {image.format}; write "
            "what it is"
        )
    check_size(image.size, where, max_pixels)  # ahead of decoding
    return Opened(_as_rgb(image, where), digest)


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


def file_bytes(source: Any, where: str) -> tuple[bytes, str]:
    """The bytes of a file, and the media type that a data URL says, or ""."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        data, kind = bytes(source), ""
    elif isinstance(source, str) and source[:5].lower() == "data:":
        data, kind = _of_url(source, where)
    elif isinstance(source, str) and re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", source):
        raise UserError(
            f"{where} is the address {quoted(source)}, and none is fetched (allowed: data URLs, "
            "data:image/png;base64,...); send the picture itself"
        )
    elif isinstance(source, (str, os.PathLike)):
        with open_regular(Path(source)) as file:
            data, kind = file.read(MAX_BYTES + 1), ""
    else:
        raise UserError(
            f"{where} is {quoted(source)} (allowed: a path, bytes, a data URL, an array, an image "
            "of PIL)"
        )
    if not 0 < len(data) <= MAX_BYTES:
        raise UserError(f"{where} has {len(data)} bytes (allowed: 1 to {MAX_BYTES}); shrink it")
    return data, kind


def _of_url(url: str, where: str) -> tuple[bytes, str]:
    begin = DATA_URL.match(url[:200])
    if begin is None:
        raise UserError(f"{where} is {quoted(url)} (allowed: data:image/png;base64,... and alike)")
    return of_base64(url[begin.end() :], where), begin[1] or ""


def of_base64(text: str, where: str) -> bytes:
    """The bytes that base64 stands for."""
    if len(text) > MAX_BYTES * 4 // 3 + 4:
        raise UserError(f"{where} has more than {MAX_BYTES} bytes; shrink it")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"{where} is no base64 ({quoted(str(error))}); encode it again") from None


def _of_array(values: np.ndarray[Any, Any], where: str) -> Image:
    from PIL import Image

    is_shape = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in (3, 4))
    if values.dtype != np.uint8 or not is_shape or 0 in values.shape:
        raise UserError(
            f"{where} is an array of {values.dtype}, {list(values.shape)} (allowed: uint8, [H, W], "
            "[H, W, 3] or [H, W, 4])"
        )
    return Image.fromarray(np.ascontiguousarray(values))


def _as_rgb(image: Image, where: str) -> Image:
    """The picture upright, its alpha on white."""
    from PIL import Image, ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if "A" not in image.getbands() and image.info.get("transparency") is None:
            return image.convert("RGB")
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    except Exception as error:
        raise UserError(
            f"{where} cannot be decoded ({quoted(str(error))}); its file is damaged or cut off"
        ) from None


def _digest_of(image: Image) -> bytes:
    """Of mode, size, palette, transparency, orientation and pixels."""
    digest = hashlib.blake2b(digest_size=32)
    palette = image.getpalette() if image.mode in ("P", "PA") else None
    of = image.info.get("transparency"), image.getexif().get(ORIENTATION)
    digest.update(repr((image.mode, image.size, palette, *of)).encode())
    digest.update(image.tobytes())
    return digest.digest()
