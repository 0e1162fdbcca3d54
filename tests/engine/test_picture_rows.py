"""Rows of pictures are held by those who read them, shared, and lost by nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from predict import SamplingParams
from predict.engine.picture_rows import PictureRows
from predict.engine.request_state import Request, RequestStatus
from predict.errors import UserError
from predict.images.areas import AreaPixels
from predict.images.placed import Picture, resized_picture, with_pictures

PIXELS = AreaPixels(patch_size=4)


def picture(number: int) -> Picture:
    """A picture of 1 to 12 tokens, the same for the same number."""
    rows, columns = 1 + number % 3, 1 + number % 4
    values = np.zeros((8 * rows, 8 * columns, 3), np.uint8)
    return resized_picture(number.to_bytes(32, "little"), values, PIXELS)


def request_of(number: int, *pictures: int) -> Request:
    ids = [token for _ in pictures for token in (1, 9)]
    ids, placed = with_pictures([*ids, 1], [picture(each) for each in pictures], 9)
    return Request(number, ids, SamplingParams(), pictures=placed)


def test_random_arrivals_and_ends_lose_no_row() -> None:
    """What a request has encoded stays in its rows until it gives them back."""
    rng, table = np.random.default_rng(48), PictureRows(40)
    content: dict[int, bytes] = {}  # by row
    running: list[Request] = []
    num_encoded = num_seen = 0
    for number in range(10_000):
        if running and rng.random() < 0.5:
            table.release(running.pop(int(rng.integers(len(running)))))
        request = request_of(number, *rng.integers(0, 24, rng.integers(1, 4)).tolist())
        assert request.pictures is not None
        cached = int(rng.integers(0, request.num_tokens)) if rng.random() < 0.3 else 0
        if table.has_room(request, cached):
            table.hold(request, cached)
            request.status = RequestStatus.RUNNING
            running.append(request)
            for each in request.pictures.within(cached, request.pictures.end):
                held, num_seen = table.held(each.picture), num_seen + 1
                if not held.is_encoded and rng.random() < 0.9:
                    content |= dict.fromkeys(held.rows.tolist(), each.picture.digest)
                    held.is_encoded, num_encoded = True, num_encoded + 1
                if held.is_encoded:
                    assert len(held.rows) == each.picture.num_tokens
                    assert {content[row] for row in held.rows.tolist()} == {each.picture.digest}
        if number % 50 == 0:
            table.check(running)
    assert 0 < num_encoded < num_seen
    for request in running:
        table.release(request)
        table.release(request)  # changes nothing
    table.check([])


def test_pictures_that_never_have_room_together_are_refused() -> None:
    with pytest.raises(UserError, match=r"its pictures have 12 rows \(allowed: up to 9"):
        PictureRows(9).check_fits(request_of(3, 11))
    PictureRows(12).check_fits(request_of(3, 11))


def test_lost_and_stolen_rows_are_found() -> None:
    def spoilt(change: Any) -> None:
        table, request = PictureRows(20), request_of(1, 11)
        request.status = RequestStatus.RUNNING
        table.hold(request, 0)
        table.check([request])
        change(table)
        with pytest.raises(RuntimeError):
            table.check([request])

    spoilt(lambda table: table._free.pop())
    spoilt(lambda table: table._holders.clear())
    spoilt(lambda table: setattr(table.held(picture(11)), "num_holders", 2))
