"""Runs of predictor.py over ranks, which tests stop or kill; and what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from predict.ranks.life import state_of
from tests.support.paths import DEMO, ROOT

NUM_PROMPTS = 16
NUM_TOKENS = 24  # of each answer, which no end of text shortens


def write_prompts(folder: Path) -> None:
    """The data file of runs in `folder`."""
    lines = [json.dumps({"src": f"line {index} of a text"}) for index in range(NUM_PROMPTS)]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")


def start(folder: Path, timeout: float, *words: str, num_ranks: int = 2) -> subprocess.Popen[str]:
    """The front of a run; its ranks are its children."""
    command = [
        *(sys.executable, "predict/predictor.py", "--model_name_or_path", str(DEMO)),
        *("--dtype", "float32", "--device", "cpu", "--batch_size", "2", "--max_length", "64"),
        *("--data_file", str(folder / "in.jsonl"), "--output_file", str(folder / "out.jsonl")),
        *("--decode_strategy", "greedy_search", "--min_length", str(NUM_TOKENS)),
        *("--tensor_parallel_degree", str(num_ranks), "--rank_timeout", str(timeout), *words),
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def children(process_id: int) -> list[int]:
    """The processes that a process has started, in that order."""
    found: list[int] = []
    for task in Path(f"/proc/{process_id}/task").glob("*/children"):
        try:
            found += map(int, task.read_text().split())
        except OSError:
            continue
    return sorted(found)


def journal(folder: Path) -> int:
    """Answers in the journal of a run."""
    path = folder / "out.jsonl.journal"
    return max(len(path.read_text().splitlines()) - 1, 0) if path.is_file() else 0


def wait_until(what: str, seconds: float, is_so: object) -> None:
    """Returns when is_so() is; raises AssertionError after a time."""
    assert callable(is_so)
    for _ in range(int(seconds / 0.02)):
        if is_so():
            return
        time.sleep(0.02)
    raise AssertionError(f"not in {seconds} s: {what}")


def is_gone(process_id: int) -> bool:
    """Whether a process has ended, or only waits for its parent to know."""
    return state_of(process_id).letter in ("", "Z", "X")


def shared_files() -> set[str]:
    """What lies in /dev/shm."""
    return set(os.listdir("/dev/shm"))
