"""What a picture may be, in numbers. Imports no NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from predict.errors import UserError, quoted, unknown_key
from predict.system.ranges import Range

MAX_PIXELS = 1 << 26  # of one picture, unless a flag says another number
MOST_PIXELS = 1 << 27  # that a flag may say
MAX_BYTES = 1 << 26  # of one file
MAX_TOGETHER = 8  # times the pixels of one picture: of all pictures of a prompt
# Of what a prompt's addresses lead to, in times of one's: bytes are held until they are decoded.
FETCHED_TOGETHER = 2
MAX_SCANS = 100  # of a JPEG
MAX_HEAD_READS = 1 << 14  # of a file's header; files that cameras and editors write take hundreds
MAX_SIDES = 200  # one side over the other
LOW_PIXELS = 512 * 512  # of a picture of low detail, as OpenAI has it
AREA = Range(1, 1 << 28)  # pixels
OPTIONS = ("min_pixels", "max_pixels")  # that a request, and a flag, may change
SWITCHES = ("do_pan_and_scan",)  # that a flag may change, besides


def check_options(options: Mapping[str, Any], where: str) -> None:
    """Raises UserError for other options than OPTIONS, and for other values than areas."""
    for key, value in options.items():
        if key not in OPTIONS:
            raise unknown_key(where, key, OPTIONS)
        if value not in AREA:
            raise UserError(f"{where}: {key} is {quoted(value)} (allowed: {AREA})")
