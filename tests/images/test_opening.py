"""Pictures are opened within limits, upright and on white; what is no picture is refused."""

from __future__ import annotations

import base64
import contextlib
import json
import struct
import warnings
import zlib
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

from predict.errors import UserError
from predict.images.areas import AreaPixels
from predict.images.cropped import CroppedPixels
from predict.images.fixed import BILINEAR, HALVES, FixedPixels
from predict.images.longest import LongestPixels
from predict.images.opening import opened
from predict.images.pixels import Pixels, read_pixels
from predict.images.placed import Picture, picture_of
from predict.images.tiles import TilePixels
from predict.loading.model import read_spec
from predict.loading.vision import pixels_of
from tests.support.pictures import (
    GOLDEN_IMAGES,
    drawn,
    in_mode,
    needs_pillow_of_goldens,
    other_pixel_cases,
    pixel_cases,
    sampled,
    turned,
)


def encoded(image: Any, form: str = "PNG", **options: Any) -> bytes:
    """A picture's file."""
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


@needs_pillow_of_goldens
def test_pixels_equal_those_of_transformers() -> None:
    golden = np.load(GOLDEN_IMAGES / "pixels.npz")
    for index, (image, options) in enumerate(pixel_cases()):
        picture = picture_of(image, AreaPixels().changed(options, ""))
        assert picture.grid == tuple(golden["grids"][index]), index
        got = sampled(picture.patches.reshape(len(picture.patches), 3, -1))
        np.testing.assert_allclose(got, golden["values"][index], atol=1e-5, err_msg=str(index))


# How kinds make pictures, where their files say nothing.
PIXELS: dict[str, Pixels] = {
    "paddleocr_vl": AreaPixels(temporal_patch_size=1, grows_sides=True),
    "gemma3": FixedPixels(
        height=56, width=56, resample=BILINEAR, image_mean=HALVES, image_std=HALVES
    ),
    "mistral3": LongestPixels(),
    "internvl": TilePixels(height=56, width=56),
    "llava": CroppedPixels(shortest_edge=42, side=28),
}


@needs_pillow_of_goldens
@pytest.mark.parametrize("kind", PIXELS)
def test_pixels_of_other_kinds_equal_those_of_transformers(kind: str) -> None:
    golden = np.load(GOLDEN_IMAGES / "other_pixels.npz")
    for index, (image, options) in enumerate(other_pixel_cases()[kind]):
        fields = PIXELS[kind].of_size(options.pop("size"), "") if "size" in options else options
        picture = picture_of(image, replace(PIXELS[kind], **fields))
        got = whole(picture)
        assert got.shape == tuple(golden[f"{kind}_shapes"][index]), index
        wanted = golden[f"{kind}_values"][index]
        np.testing.assert_allclose(sampled(got, 40), wanted, atol=1e-5, err_msg=str(index))


def whole(picture: Picture) -> Any:
    """[3, height, width] of a picture's patches; tiles one below the other."""
    pixels, columns = picture.pixels, picture.cells[1]
    side, merge = pixels.patch_size, pixels.merge_size
    cut = picture.patches.reshape(-1, columns, merge, merge, 3, side, side)
    return cut.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, -1, columns * merge * side)


def test_files_of_all_formats_are_pictures(tmp_path: Path) -> None:
    image = drawn(1, (20, 30))
    for form, loss in (("PNG", 0), ("BMP", 0), ("GIF", 20), ("JPEG", 20), ("WEBP", 20)):
        data = encoded(image, form)
        (tmp_path / "picture").write_bytes(data)
        url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
        for source in (data, tmp_path / "picture", str(tmp_path / "picture"), url):
            found = opened(source)
            assert (found.image.mode, found.image.size) == ("RGB", (20, 30))
            assert np.abs(np.asarray(found.image) - np.asarray(image, int)).mean() <= loss
        assert opened(data).digest == opened(url).digest
    array = np.asarray(image)
    assert opened(array).digest == opened(image).digest != opened(array[::-1]).digest


@pytest.mark.parametrize("orientation", range(1, 9))
def test_pictures_stand_upright(orientation: int) -> None:
    from PIL import Image, ImageOps

    image = drawn(0, (6, 9))
    exif = Image.Exif()
    exif[0x0112] = orientation
    wanted = ImageOps.exif_transpose(turned(image.copy(), orientation))
    found = opened(encoded(image, exif=exif))
    np.testing.assert_array_equal(np.asarray(found.image), np.asarray(wanted))


def test_alpha_lies_on_white() -> None:
    image = np.zeros((2, 2, 4), np.uint8)
    assert (np.asarray(opened(image).image) == 255).all()
    see_through = in_mode(drawn(2, (9, 9), "RGBA"), "P, see-through")
    hidden = np.asarray(see_through) == 3
    tall = drawn(2, (9, 600), "RGBA")
    white = tall.copy()
    white.paste((255, 255, 255, 255), (0, 0, *tall.size))
    white.alpha_composite(tall)
    assert opened(tall).image.tobytes() == white.convert("RGB").tobytes()
    assert hidden.any()
    assert (np.asarray(opened(encoded(see_through, transparency=3)).image)[hidden] == 255).all()


def test_pictures_that_differ_have_different_digests() -> None:
    """In mode, size, palette, orientation or options: what pixels alone do not say."""
    plain = in_mode(drawn(2, (12, 8), "RGBA"), "P")
    other = plain.copy()
    other.putpalette([255 - value for value in plain.getpalette() or []])
    flat = np.zeros((4, 6), np.uint8)
    images = [plain, other, turned(plain.copy(), 3), flat, flat.T, np.stack([flat] * 3, -1)]
    pixels = [AreaPixels(min_pixels=16), AreaPixels(min_pixels=17)]
    for alpha in (0, 200):
        clear = plain.copy()
        clear.putpalette([7, 7, 7, alpha] * 256, "RGBA")
        images.append(clear)
    assert (np.asarray(opened(images[-2]).image) == 255).all()
    digests = {picture_of(image, each).digest for image in images for each in pixels}
    assert len(digests) == len(images) * len(pixels)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says its size and has next to nothing."""
    parts = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), zlib.compress(b"\0" * 99), b""
    chunks = (
        struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
        for kind, part in zip((b"IHDR", b"IDAT", b"IEND"), parts, strict=True)
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def coded_bmp(width: int, height: int) -> bytes:
    """A BMP of coded runs that says its size: a row is the end of a row."""
    runs, start = b"\1\0\0\0" * height, 14 + 40 + 1024
    sizes = struct.pack("<IIiiHHIIiiII", start, 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<II", start + len(runs), 0) + sizes + bytes(1024) + runs


PNG, JPEG = (encoded(drawn(3, (30, 20)), form) for form in ("PNG", "JPEG"))
BAD: dict[str, tuple[Any, str]] = {
    "text": (b"no picture", "no picture that can be read"),
    "nothing": (b"", r"0 bytes \(allowed: 1 to"),
    "cut off": (PNG[: len(PNG) // 2], "damaged or cut off"),
    "damaged": (PNG[:60] + b"\0" * 40 + PNG[100:], "damaged or cut off|can be read"),
    "bomb": (png_header(60000, 60000), r"60000 x 60000 pixels|can be read"),
    "large": (png_header(9000, 9000), r"9000 x 9000 pixels \(allowed: up to 67108864"),
    "long header": (JPEG[:2] + b"\xff\xe3\0\2" * 9999 + JPEG[2:], "a header of more parts"),
    "coded runs": (coded_bmp(30, 20), "is a BMP of coded runs"),
    "narrow": (encoded(drawn(1, (402, 2))), "sides up to 200 to 1"),
    "TIFF": (encoded(drawn(1, (9, 9)), "TIFF"), "allowed: PNG, JPEG, WebP, GIF, BMP"),
    "another kind": ("data:image/jpeg;base64," + base64.b64encode(PNG).decode(), "says that it is"),
    "no base64": ("data:image/png;base64,%%%", "no base64"),
    "address": ("https://example.com/a.png", "is the address 'https://example.com/a.png', and"),
    "no file": ("/nowhere/a.png", "cannot read /nowhere/a.png"),
    "floats": (np.zeros((4, 4, 3)), r"array of float64, \[4, 4, 3\] \(allowed: uint8"),
    "number": (7, r"is 7 \(allowed: a path"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_no_picture_is_refused(case: str) -> None:
    source, words = BAD[case]
    with pytest.raises(UserError, match=words) as error:
        opened(source, "picture 2")
    assert case == "no file" or "picture 2" in str(error.value)


def test_a_jpeg_with_others_behind_it_is_a_jpeg() -> None:
    """What cameras write."""
    image = drawn(1, (20, 30))
    data = encoded(image, "MPO", save_all=True, append_images=[image])
    opened("data:image/jpeg;base64," + base64.b64encode(data).decode())


def test_warnings_of_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of threads that run while a picture is opened."""
    from PIL import Image

    def noisy(*args: Any, **options: Any) -> Any:
        warnings.warn("of another thread", stacklevel=1)
        return whole(*args, **options)

    whole = Image.open
    monkeypatch.setattr(Image, "open", noisy)
    with pytest.warns(UserWarning, match="of another thread"):
        opened(PNG)


def test_jpegs_of_endless_scans_are_refused() -> None:
    data = encoded(drawn(1, (20, 30)), "JPEG", progressive=True)
    scan = data[data.rfind(b"\xff\xda") : -2]
    opened(data[:-2] + scan * 50 + data[-2:])
    with pytest.raises(UserError, match="picture 2 has more than 100 scans"):
        opened(data[:-2] + scan * 100 + data[-2:], "picture 2")


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_mutated_files_end_in_pictures_or_our_errors(form: str) -> None:
    rng = np.random.default_rng(5)
    whole = np.frombuffer(encoded(drawn(1, (40, 30)), form), np.uint8)
    for _ in range(100):
        data = whole.copy()
        data[rng.integers(0, len(data), rng.integers(1, 6))] = rng.integers(0, 256)
        if rng.random() < 0.3:
            data = data[: rng.integers(1, len(data))]
        with contextlib.suppress(UserError):
            assert opened(data.tobytes(), max_pixels=1 << 20).image.mode == "RGB"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"patch_size": 0}', "patch_size is 0"),
        ('{"size": {"height": 3}}', "size has the key 'height'"),
        ('{"image_std": [0, 1, 1]}', "image_std is"),
        ('{"resample": 9}', "resample"),
        ('{"do_tile": true}', "has the key 'do_tile'"),
        ('{"do_resize": 1}', "do_resize is 1"),
    ],
)
def test_wrong_processors_are_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(UserError, match=words):
        read_pixels(tmp_path, AreaPixels())


def test_crops_need_a_place_in_prompts(tmp_path: Path) -> None:
    spec, _ = read_spec(GOLDEN_IMAGES / "llava")
    assert spec.vision is not None
    vision = replace(spec.vision, pixels=FixedPixels())
    with pytest.raises(UserError, match="prompts of llava have no place for crops"):
        pixels_of(vision, tmp_path, {"do_pan_and_scan": True})


def test_an_image_whose_file_is_cut_off_is_refused() -> None:
    image = PIL.Image.open(BytesIO(PNG[: len(PNG) // 2]))
    with pytest.raises(UserError, match="damaged or cut off"):
        opened(image)


def test_what_processors_would_do_and_we_do_not_is_refused(tmp_path: Path) -> None:
    fixed, longest, cropped = FixedPixels(), LongestPixels(), CroppedPixels()
    for default, key in (
        (fixed, "do_center_crop"),
        (fixed, "do_pad"),
        (longest, "do_center_crop"),
        (cropped, "do_pad"),
    ):
        said = tmp_path / "preprocessor_config.json"
        said.write_text(json.dumps({key: True}))
        with pytest.raises(UserError, match=f"{key} is True, which is not done"):
            read_pixels(tmp_path, default)
        said.write_text(json.dumps({key: False}))
        assert read_pixels(tmp_path, default) == default


def test_processor_config_comes_first_where_it_says_something(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"patch_size": 16}')
    for said, wanted in (("{}", 16), ('{"image_processor": {"patch_size": 18}}', 18)):
        (tmp_path / "processor_config.json").write_text(said)
        assert read_pixels(tmp_path, AreaPixels()).patch_size == wanted
    (tmp_path / "processor_config.json").write_text('{"image_processor": "Qwen"}')
    with pytest.raises(UserError, match="image_processor is 'Qwen'"):
        read_pixels(tmp_path, AreaPixels())


def test_min_and_max_pixels_win_over_size(tmp_path: Path) -> None:
    text = '{"size": {"shortest_edge": 5, "longest_edge": 99}, "min_pixels": 7, "patch_size": 16}'
    (tmp_path / "processor_config.json").write_text(f'{{"image_processor": {text}}}')
    assert read_pixels(tmp_path, AreaPixels()) == AreaPixels(
        patch_size=16, min_pixels=7, max_pixels=99
    )
    with pytest.raises(UserError, match="min_pixels 7 is more than max_pixels 6"):
        read_pixels(tmp_path, AreaPixels()).changed({"max_pixels": 6}, "here")
