"""Models on several CPU ranks: processes that stay, and load one tiny model after another.

Each rank runs the whole engine over its part of the network, step by step as the others do: what
ranks exchange, sums and logits, keeps them together. `python -m tests.support.rank_models FD RANK
SIZE` is one of them; it reads jobs from stdin, and writes an answer for each to stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from typing import Any

from predict.device import communicator


class RankProcesses:
    """`size` ranks over one memory file, started anew behind a job that failed. A context."""

    def __init__(self, size: int):
        self.size = size
        self.processes: list[subprocess.Popen[str]] = []

    def _start(self) -> None:
        size = self.size
        self.fd = os.memfd_create("ranks")
        os.truncate(self.fd, communicator.num_bytes(size))
        self.said = [tempfile.TemporaryFile("w+") for _ in range(size)]  # noqa: SIM115
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, *map(str, (self.fd, rank, size))],
                pass_fds=[self.fd],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.said[rank],
                text=True,
            )
            for rank in range(size)
        ]

    def run(self, job: str, **arguments: Any) -> list[Any]:
        """What function `module:name` returns on each rank; raises AssertionError where one fails.

        It gets `rank`, `size` and the arguments, which JSON can carry.
        """
        if not self.processes:
            self._start()
        try:
            return self._run(json.dumps([job, arguments]) + "\n")
        except BaseException:
            self.close()
            raise

    def _run(self, line: str) -> list[Any]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers = [self._answer(rank) for rank in range(self.size)]
        for rank, (error, _) in enumerate(answers):
            assert error is None, f"rank {rank} of {self.size}: {error}"
        return [value for _, value in answers]

    def _answer(self, rank: int) -> tuple[str | None, Any]:
        stdout = self.processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            self.said[rank].seek(0)
            raise AssertionError(f"rank {rank} of {self.size} ended: {self.said[rank].read()}")
        error, value = json.loads(line)
        if error is not None:  # the others may wait for this one
            os.pwrite(self.fd, b"\x01\x00\x00\x00", 0)
        return error, value

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Ends all ranks."""
        if not self.processes:
            return
        os.pwrite(self.fd, b"\x01\x00\x00\x00", 0)
        for process in self.processes:
            process.kill()
            process.communicate()
        for said in self.said:
            said.close()
        os.close(self.fd)
        self.processes = []


def main(fd: int, rank: int, size: int) -> None:
    """Does jobs until stdin ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed beside
    communicator.open_ranks(fd, rank, size)
    for line in sys.stdin:
        job, arguments = json.loads(line)
        module, _, name = job.partition(":")
        error = value = None
        try:
            value = getattr(importlib.import_module(module), name)(rank, size, **arguments)
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps([error, value]), file=out, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
