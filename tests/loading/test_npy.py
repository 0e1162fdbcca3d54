""".npy files: numbers are read, objects and claims are refused, and nothing is run."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from predict.errors import UserError
from predict.loading.npy import read_npy
from tests.support.pickles import Calls, marks

ARRAYS = (
    np.arange(6.0).reshape(2, 3),
    np.asfortranarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)),
    np.float32(3),
    np.zeros((0, 4), np.int8),
    np.arange(3, dtype=np.uint16),
    np.array([True, False]),
    np.arange(5, dtype=np.int64)[::2],
)


@pytest.mark.parametrize("index", range(len(ARRAYS)))
def test_arrays_are_read_as_numpy_reads_them(tmp_path: Path, index: int) -> None:
    np.save(tmp_path / "a.npy", ARRAYS[index])
    found = read_npy(tmp_path / "a.npy")
    assert found.shape == ARRAYS[index].shape
    np.testing.assert_array_equal(found.read(), np.asarray(ARRAYS[index]), strict=True)


def test_versions_2_and_3_are_read(tmp_path: Path) -> None:
    for version in ((2, 0), (3, 0)):
        with (tmp_path / "a.npy").open("wb") as file:
            np.lib.format.write_array(file, np.arange(3.0), version)
        assert read_npy(tmp_path / "a.npy").read().tolist() == [0, 1, 2]


def test_a_pickle_in_the_file_is_not_run(tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "a.npy"
    values = np.array([Calls(*marks(marker))], dtype=object)
    np.save(path, values, allow_pickle=True)
    with pytest.raises(UserError, match=r"dtype '\|O', Python's objects \(readable: <f8"):
        read_npy(path)
    assert not marker.exists()
    np.load(path, allow_pickle=True)
    assert marker.exists()  # the payload is real


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }"


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (GOOD.replace("(3,)", "(1000000000,)"), r"needs 4000000000 bytes, and 12 follow"),
        (GOOD.replace("(3,)", "(3, 9999999999999999999)"), "more elements than 64 bits"),
        (GOOD.replace("(3,)", "(2,)"), "needs 8 bytes, and 12 follow"),
        (GOOD.replace("(3,)", "(-3,)"), "its header is"),
        (GOOD.replace("(3,)", "__import__('os').getpid()"), "its header is"),
        (GOOD.replace("(3,)", "(" + "1" * 5000 + ")"), "its header is"),
        (GOOD.replace("<f4", ">f4"), "dtype '>f4'"),
        (GOOD.replace("'<f4'", "[('a', '<f4')]"), "its header is"),
        (GOOD.replace("False", "os.abort()"), "its header is"),
    ],
)
def test_headers_that_claim_something_else_are_refused(
    tmp_path: Path, header: str, said: str
) -> None:
    text = header.encode() + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(12)
    (tmp_path / "a.npy").write_bytes(data)
    tracemalloc.start()
    with pytest.raises(UserError, match=said):
        read_npy(tmp_path / "a.npy")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff", b"PK\x03\x04"])
def test_what_is_no_npy_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(data)
    with pytest.raises(UserError, match=r"is not a \.npy file of numbers"):
        read_npy(tmp_path / "a.npy")
