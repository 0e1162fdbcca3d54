"""The operators of pictures equal their plain twins, and what a model's processor makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paddle
from predict.device import library
from predict.images.areas import AreaPixels
from predict.ops import compiled as fast
from predict.ops import plain

PIXELS = AreaPixels(patch_size=6, merge_size=2)


def test_rows_are_put_where_they_belong(compiled: library.Library) -> None:
    rng, rows = np.random.default_rng(0), np.array([6, 0, 3], np.int32)
    for width, dtype in ((5, "float32"), (16, "bfloat16")):
        x = paddle.to_tensor(rng.standard_normal((3, width), np.float32)).astype(dtype)
        table = paddle.zeros([7, width], dtype)
        fast.put_rows(table, paddle.to_tensor(rows), x)
        wanted = np.zeros((7, width), np.float32)
        wanted[rows] = x.astype("float32").numpy()
        np.testing.assert_array_equal(table.astype("float32").numpy(), wanted)
    twin = paddle.zeros([7, width], "float32")
    plain.put_rows(twin, paddle.to_tensor(rows), x.astype("float32"))
    np.testing.assert_array_equal(twin.numpy(), wanted)
    for wrong in (7, -1):
        with pytest.raises(ValueError, match=f"rows holds {wrong} .allowed: 0 .. 6"):
            fast.put_rows(table, paddle.to_tensor(np.array([0, wrong, 1], np.int32)), x)


def test_places_in_several_dimensions_become_rotary_rows(compiled: library.Library) -> None:
    rng, axes = np.random.default_rng(1), (0, 1, 2, 2, 0)
    values = rng.standard_normal((12, 10), np.float32)
    places = rng.integers(0, 8, (4, 3)).astype(np.int32)
    tables = [paddle.to_tensor(values) for _ in range(2)]
    for ops, table in zip((fast, plain), tables, strict=True):
        ops.write_places(table, paddle.to_tensor(places), axes, 8)
    wanted = values.copy()
    for t, of in enumerate(places):
        for j, axis in enumerate(axes):
            wanted[8 + t, [j, 5 + j]] = values[of[axis], [j, 5 + j]]
    for table in tables:
        np.testing.assert_array_equal(table.numpy(), wanted)
    for first, words in ((9, "rows 9 to 13 of a table of 12"), (4, "places holds")):
        with pytest.raises(ValueError, match=words):
            fast.write_places(tables[0], paddle.to_tensor(places + 4 - 4), axes, first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_patches_are_those_of_the_processor(dtype: str, compiled: library.Library) -> None:
    """Of two pictures in one buffer, the second's first."""
    rng = np.random.default_rng(2)
    pictures = [
        rng.integers(0, 256, (24, 36, 3), np.uint8),
        rng.integers(0, 256, (12, 24, 3), np.uint8),
    ]
    pixels = np.concatenate([each.reshape(-1) for each in pictures])
    origins, strides, first = list[Any](), list[Any](), 0
    for each in pictures:
        own = PIXELS.origins(PIXELS.grid(each.shape[:2]))
        origins.append(own + first)
        strides.append(np.full(len(own), each.shape[1]))
        first += each.size
    given = [
        paddle.to_tensor(pixels),
        *(
            paddle.to_tensor(np.concatenate(part[::-1]).astype(np.int32))
            for part in (origins, strides)
        ),
    ]
    args: Any = ((6, 112), PIXELS.scaling, dtype)
    got, twin = (ops.cut_patches(*given, *args).astype("float32").numpy() for ops in (fast, plain))
    wanted = np.concatenate([PIXELS.patches(each) for each in pictures[::-1]])
    rounded = paddle.to_tensor(wanted).astype(dtype).astype("float32").numpy()
    np.testing.assert_array_equal(got[:, :108], rounded)
    np.testing.assert_array_equal(got, twin)
    assert not got[:, 108:].any()
    given[1] = given[1] + 4000
    with pytest.raises(ValueError, match="cut_patches: patch 0 begins at byte"):
        fast.cut_patches(*given, *args)
