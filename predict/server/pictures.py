"""Pictures from a request's parts to the engine: opened by the front, and sent resized."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from predict.errors import UserError, quoted
from predict.images.fetching import is_address
from predict.images.files import DATA_URL
from predict.images.placed import Pictures, placed_at, resized_picture
from predict.server.errors import invalid
from predict.server.wire import SentPicture
from predict.sight import Sight
from predict.text.conversation import PICTURE_PARTS, PicturePart, picture_part

Found = list[tuple[str, PicturePart]]  # fields of a request, and their pictures


def asked_picture(part: dict[str, Any], where: str) -> PicturePart:
    """The picture of a part of a request: a data URL, or an address, which is not asked here.

    Raises ApiError 400 that names the field.
    """
    param = f"{where}.{PICTURE_PARTS[part['type']]}"
    try:
        found = picture_part(part)
    except UserError as error:
        raise invalid(param, f"{where}: {error}") from None
    source = found.source
    if is_address(source) or (isinstance(source, str) and DATA_URL.match(source[:200])):
        return found
    raise invalid(
        param,
        f"{param} is {quoted(source)} (allowed: data:image/png;base64,... of the picture itself, "
        "or an address that the server's flags allow)",
        "unsupported_content",
    )


def sent_pictures(pictures: Pictures | None) -> list[SentPicture]:
    """Pictures for the engine."""
    placed = () if pictures is None else pictures.placed
    return [
        SentPicture(start, each.digest, each.values.shape, each.values.tobytes())
        for start, each, _ in placed
    ]


def received_pictures(sent: Sequence[SentPicture], sight: Sight) -> Pictures:
    """Pictures that the front has sent. Raises UserError where the model has no tower."""
    if sight.reader is None:
        raise UserError("this model reads text alone; leave pictures out")
    pixels = sight.reader.pixels
    pictures = [
        resized_picture(
            each.digest, np.frombuffer(each.values, np.uint8).reshape(each.shape), pixels
        )
        for each in sent
    ]
    return placed_at([each.start for each in sent], pictures)
