"""The bytes of a picture's file: of a path, a data URL, base64. Imports no NumPy."""

from __future__ import annotations

import base64
import binascii
import os
import re
from pathlib import Path
from typing import Any

from predict.errors import UserError, quoted
from predict.images.fetching import NO_MEDIA, Media, is_address
from predict.images.limits import MAX_BYTES
from predict.system.files import open_regular

DATA_URL = re.compile(r"data:([a-zA-Z0-9.+-]+/[a-zA-Z0-9.+-]+)?(;[a-zA-Z0-9=.+-]+)*;base64,")


def file_bytes(source: Any, where: str, media: Media = NO_MEDIA) -> tuple[bytes, str]:
    """The bytes of a file, and the media type that a data URL says, or "".

    media: where addresses may be fetched from.
    """
    if isinstance(source, (bytes, bytearray, memoryview)):
        data, kind = bytes(source), ""
    elif isinstance(source, str) and source[:5].lower() == "data:":
        data, kind = _of_url(source, where)
    elif is_address(source):
        data, kind = media.bytes_of(source, where), ""
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
