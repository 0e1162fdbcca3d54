"""Whatever happens to a process of a run over ranks, all of it ends, and --resume goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from predict.device import library
from predict.ranks.life import state_of
from tests.support.paths import ROOT
from tests.support.rank_runs import (
    NUM_PROMPTS,
    children,
    is_gone,
    journal,
    shared_files,
    start,
    wait_until,
    write_prompts,
)

pytestmark = pytest.mark.skipif(library.find() is None, reason="needs the compiled library")
TIMEOUT = 2.0  # seconds without progress
PATIENCE, PROMISE = 60.0, 5.0  # seconds in which all have ended besides: at all, and as promised


def hit(folder: Path, number: int, victim: int, when: str, slack: float = PATIENCE) -> str:
    """Sends a signal to a process of a run, 0 its front, and returns what the run then said.

    All of it must end. when: "loading", or "decoding". slack: seconds for that, besides TIMEOUT.
    """
    write_prompts(folder)
    before = shared_files()
    done = journal(folder)
    front = start(folder, TIMEOUT, "--resume")
    wait_until("the ranks start", 120, lambda: len(children(front.pid)) == 2)
    ranks = children(front.pid)
    if when == "decoding":
        wait_until("an answer", 240, lambda: journal(folder) > done or front.poll() is not None)
    if front.poll() is not None:
        raise AssertionError(front.communicate()[1])
    ids = [front.pid, *ranks]
    os.kill(ids[victim], number)
    waits = slack + (TIMEOUT if number == signal.SIGSTOP else 0.0)
    wait_until("all have ended", waits, lambda: all(map(is_gone, ids)))
    _, said = front.communicate(timeout=PATIENCE)
    assert front.returncode != 0
    assert shared_files() <= before
    return said


def check_resumed(folder: Path) -> None:
    """Lets a run go on to its end: each prompt has one answer, in order."""
    front = start(folder, 60.0, "--resume")
    _, said = front.communicate(timeout=400)
    assert front.returncode == 0, said
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [line["src"] for line in lines] == [f"line {i} of a text" for i in range(NUM_PROMPTS)]
    assert all(line["output"] for line in lines)


def test_a_killed_rank_ends_the_run_by_name_and_resume_goes_on(tmp_path: Path) -> None:
    said = hit(tmp_path, signal.SIGKILL, 2, "decoding")
    assert "rank 1 (process " in said
    assert "was ended by signal 9 (SIGKILL)" in said
    assert 0 < journal(tmp_path) < NUM_PROMPTS
    check_resumed(tmp_path)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_ends_the_run_after_the_timeout(tmp_path: Path, victim: int) -> None:
    said = hit(tmp_path, signal.SIGSTOP, victim, "decoding")
    if victim == 0:
        assert "the front (process " in said
        assert "was stopped for 2 s" in said
    else:
        assert "rank 0 (process " in said
        assert "made no progress for 2 s (--rank_timeout), and is stopped by a signal" in said


def test_a_killed_front_ends_its_ranks_while_they_load(tmp_path: Path) -> None:
    hit(tmp_path, signal.SIGKILL, 0, "loading")


@pytest.mark.slow
def test_ten_random_ends_leave_nothing_and_resume_answers_each_line_once(tmp_path: Path) -> None:
    chance = random.Random(4)
    for _ in range(10):
        number = chance.choice([signal.SIGKILL, signal.SIGSTOP])
        when = chance.choice(["loading", "decoding"])
        hit(tmp_path, number, victim=chance.randrange(3), when=when, slack=PROMISE)
        if journal(tmp_path) > NUM_PROMPTS - 6:
            (tmp_path / "out.jsonl.journal").unlink()
    check_resumed(tmp_path)


TWO_GROUPS = """
import signal
from predict.ranks.front import Ranks
first, second = (Ranks({}, 1, 60.0, "sleeping") for _ in range(2))
first.close()
third = Ranks({}, 1, 60.0, "sleeping")
print("made", flush=True)
input()
second.close()
third.close()
assert signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL
"""


def test_the_terminal_stops_the_ranks_of_all_models_that_live(tmp_path: Path) -> None:
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(120)\n")
    front = subprocess.Popen(
        [sys.executable, "-c", TWO_GROUPS],
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert front.stdout is not None
        assert front.stdout.readline() == "made\n"
        ids = [front.pid, *children(front.pid)]
        assert len(ids) == 3
        os.kill(front.pid, signal.SIGTSTP)
        wait_until("all have stopped", 60, lambda: all(state_of(each).is_stopped for each in ids))
        os.kill(front.pid, signal.SIGCONT)
        wait_until("all go on", 60, lambda: not any(state_of(each).is_stopped for each in ids))
        _, said = front.communicate("\n", timeout=60)
        assert front.returncode == 0, said
    finally:
        front.kill()


@pytest.mark.slow
def test_a_run_that_the_terminal_stops_goes_on(tmp_path: Path) -> None:
    write_prompts(tmp_path)
    front = start(tmp_path, TIMEOUT)
    wait_until("an answer", 240, lambda: journal(tmp_path) > 0)
    ids = [front.pid, *children(front.pid)]
    os.kill(front.pid, signal.SIGTSTP)
    wait_until("all have stopped", PATIENCE, lambda: all(state_of(each).is_stopped for each in ids))
    time.sleep(TIMEOUT + 1)
    os.kill(front.pid, signal.SIGCONT)
    _, said = front.communicate(timeout=400)
    assert front.returncode == 0, said
