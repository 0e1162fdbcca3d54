"""The communicator of CPU ranks, in processes as they run."""

from __future__ import annotations

import os

import numpy as np
import pytest

from predict.device import communicator, library
from tests.support.rank_runs import wait_until
from tests.support.ranks import LENGTHS, digest, part, start

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values as a tensor of another type has them: bfloat16 as uint16."""
    import paddle

    return paddle.to_tensor(values).astype(dtype).numpy()


def widened(values: np.ndarray, dtype: str) -> np.ndarray:
    import paddle

    return paddle.to_tensor(values).astype(dtype).astype("float32").numpy()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_all_ranks_get_the_sum_in_the_order_of_ranks_and_all_parts(size: int) -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, communicator.num_bytes(size))
    processes = start(fd, size)
    texts = []
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        texts.append(out)
    os.close(fd)
    expected = []
    for length in LENGTHS:
        parts = [part(rank, length) for rank in range(size)]
        total = sum(parts[1:], start=parts[0])
        halves = []
        for dtype in ("bfloat16", "float16"):
            wide = [widened(each, dtype) for each in parts]
            halves.append(digest(rounded(sum(wide[1:], start=wide[0]), dtype)))
        every = digest(np.stack(parts))
        expected.append(" ".join([digest(total)] * 2 + halves + [every] * 2))
    assert [text.splitlines() for text in texts] == [expected] * size


def test_a_rank_that_waits_ends_when_all_are_told_to() -> None:
    fd = os.memfd_create("test")
    os.truncate(fd, communicator.num_bytes(2))
    (process, other) = start(fd, 2)
    other.kill()
    other.communicate()
    wait_until("rank 0's first exchange", 60, lambda: os.pread(fd, 4, 64) != bytes(4))
    os.pwrite(fd, b"\x01\x00\x00\x00", 0)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "rank 0 waited for rank 1, and all ranks were told to end" in errors
    os.close(fd)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 65)])
def test_a_rank_that_cannot_be_is_refused(rank: int, size: int) -> None:
    with pytest.raises(library.LibraryError, match=f"rank {rank} of {size}"):
        communicator.open_ranks(0, rank, size)


def test_a_memory_file_that_is_too_small_is_refused() -> None:
    fd = os.memfd_create("test")
    with pytest.raises(library.LibraryError, match="not there, or too small"):
        communicator.open_ranks(fd, 0, 2)
    os.close(fd)
