"""Files are decoded in processes of their own, whose time and memory are limited."""

from __future__ import annotations

from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from predict.errors import UserError
from predict.images import decoding
from predict.images.areas import AreaPixels
from predict.images.decoding import Workers, decoded
from tests.support.pictures import drawn

PIXELS = AreaPixels(patch_size=4, min_pixels=64, max_pixels=4000)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    file = BytesIO()
    image.save(file, kind)
    return file.getvalue()


@pytest.fixture(scope="module")
def large() -> bytes:
    """9 Mpixel of a few kilobytes, which take some 0.1 s and 72 MB."""
    return file_of(Image.new("RGBA", (3000, 3000), (5, 6, 7, 128)))


def test_workers_decode_as_this_process_does() -> None:
    workers = Workers()
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP"):
        data = file_of(drawn(3, (80, 50)), kind)
        np.testing.assert_array_equal(
            workers.decode(data, PIXELS, "picture 1"), decoded(data, PIXELS, "picture 1")
        )


def test_what_takes_too_much_is_refused_by_name_alone(
    large: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, workers = file_of(drawn(3, (80, 50))), Workers(seconds=0.05)
    with pytest.raises(UserError, match=r"picture 2 takes more than 0\.05 s of CPU time to decode"):
        workers.decode(large, PIXELS, "picture 2")
    assert workers.decode(small, PIXELS, "picture 3").shape == (48, 80, 3)  # by another process
    monkeypatch.setattr(decoding, "BASE_BYTES", 192 << 20)
    workers = Workers(max_pixels=1)
    with pytest.raises(UserError, match="picture 2 takes more than 192 MiB of memory to decode"):
        workers.decode(large, PIXELS, "picture 2")
    assert workers.decode(small, PIXELS, "picture 3").shape == (48, 80, 3)


def test_damage_is_told_in_our_own_words() -> None:
    data, workers = file_of(drawn(3, (80, 50)), "JPEG"), Workers()
    with pytest.raises(UserError, match=r"picture 2 cannot be decoded .*damaged or cut off"):
        workers.decode(data[:-400], PIXELS, "picture 2")
    assert workers.decode(data, PIXELS, "picture 3").shape == decoded(data, PIXELS, "").shape
