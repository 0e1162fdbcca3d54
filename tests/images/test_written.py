"""Placeholders that are texts (Gemma 3's) are encoded with what stands around them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predict.errors import UserError
from predict.images.fixed import FixedPixels
from predict.images.pixels import Placeholder
from predict.images.placed import picture_of, pictures_in, with_pictures
from predict.images.written import written
from predict.text.tokenizer import Tokenizer
from tests.support.pictures import GOLDEN_IMAGES, PAN_AND_SCAN, drawn

MARK, TOKEN, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
HOLDER = Placeholder(261, mark=259, end=260)
WHOLE = f"\n\n{MARK}{TOKEN}{END}\n\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(GOLDEN_IMAGES / "qwen2_5_vl")


@pytest.mark.parametrize(
    ("text", "counts", "wanted"),
    [
        ("a", [], "a"),
        (f"a\n{MARK}b", [1], f"a\n{WHOLE}b"),
        (
            f"{MARK} and{MARK}",
            [3, 1],
            f"Here is the original image {WHOLE} and here are some crops to help you see better "
            f"{WHOLE} {WHOLE} and{WHOLE}",
        ),
        (f"{MARK}{TOKEN}{END}", [1], f"{MARK}{TOKEN}{END}"),
    ],
)
def test_marks_become_placeholders(
    text: str, counts: list[int], wanted: str, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(written(ids, counts, HOLDER, tokenizer), False) == wanted


def test_more_marks_than_pictures_are_refused(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"{MARK}{MARK}", add_special_tokens=False)
    with pytest.raises(UserError, match=r"2 placeholders .*, and 1 pictures"):
        written(ids, [1], HOLDER, tokenizer)
    ids = tokenizer.encode(f"{TOKEN}{MARK}", add_special_tokens=False)  # a user's text, a picture
    with pytest.raises(UserError, match="leave that out of texts"):
        written(ids, [1], HOLDER, tokenizer)
    with pytest.raises(UserError, match="without a tokenizer"):
        written([259, 259], [1, 1], HOLDER, None)


def test_crops_are_pictures_of_their_own() -> None:
    pixels = FixedPixels(patch_size=4, merge_size=2, height=8, width=8, layout="text")
    pixels = replace(pixels, **PAN_AND_SCAN)
    apart = pictures_in(picture_of(drawn(1, (60, 20)), pixels))
    assert len({each.digest for each in apart}) == len(apart) == 4
    ids, pictures = with_pictures([1, *[261, 2] * 4], apart, HOLDER)
    assert pictures is not None
    assert [each.start for each in pictures.placed] == [1, 3, 5, 7]
    np.testing.assert_array_equal(pictures.positions(0, len(ids)), np.arange(len(ids)))
