"""One of several ranks in a process of its own: `python -m tests.support.ranks FD RANK SIZE`.

It sums and gathers arrays that each rank makes of its number, and prints digests of the results.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from predict.device import communicator
from predict.ops import compiled, plain

LENGTHS = (1, 7, 896, 70_001, 300_000)  # of float32: the last two take several exchanges


def part(rank: int, length: int) -> npt.NDArray[np.float32]:
    """What a rank brings to the sum of `length`."""
    return np.random.default_rng(rank).standard_normal(length, np.float32)


def digest(values: npt.NDArray[Any]) -> str:
    """Names these bits."""
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def start(fd: int, size: int) -> list[subprocess.Popen[str]]:
    """The processes of `size` ranks over a memory file."""
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.ranks", *map(str, (fd, rank, size))],
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def main(fd: int, rank: int, size: int) -> None:
    """Prints a line per result."""
    import paddle

    communicator.open_ranks(fd, rank, size)
    for length in LENGTHS:
        values = part(rank, length)
        tensor = paddle.to_tensor(values)
        sums = [compiled.sum_ranks(tensor), plain.sum_ranks(tensor)]
        halves = [compiled.sum_ranks(tensor.astype(each)) for each in ("bfloat16", "float16")]
        row, counts = tensor.reshape([1, -1]), [length] * size
        every = [ops.gather_ranks(row, counts) for ops in (compiled, plain)]
        print(*(digest(each.numpy()) for each in (*sums, *halves, *every)))
    communicator.close_ranks()
    assert bool((compiled.sum_ranks(paddle.ones([3])) == 1).all())
    os.close(fd)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
