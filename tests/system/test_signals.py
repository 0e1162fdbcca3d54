"""Signals end a command in good order; a second one at once; closed streams never do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from predict.cli.command import run_command
from predict.errors import UserError
from predict.system import console
from predict.system.signals import Interrupted, Signals
from tests.support.signals import NUMBERS, as_from_a_terminal

ROOT = Path(__file__).resolve().parents[2]
PREAMBLE = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"


@pytest.fixture(autouse=True)
def shell_handlers() -> Iterator[None]:
    """A shell's background jobs start with SIGINT ignored; these tests start as a terminal's do."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    as_from_a_terminal()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_a_command_with_128_and_its_number(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    ended = []

    def action(signals: Signals) -> int:
        try:
            signal.raise_signal(number)
        finally:
            ended.append(True)
        return 0

    assert run_command(action, "interrupted: go on") == 128 + number
    assert ended
    assert capfd.readouterr().err == "interrupted: go on\n"
    assert signal.getsignal(number) == signal.SIG_DFL


def test_a_held_signal_waits_for_the_check(capfd: pytest.CaptureFixture[str]) -> None:
    with Signals() as signals:
        with signals.held("ending the step"):
            signal.raise_signal(signal.SIGTERM)
            assert signals.number == signal.SIGTERM
        with pytest.raises(Interrupted) as caught:
            signals.check()
    assert caught.value.number == signal.SIGTERM
    assert capfd.readouterr().err == "SIGTERM: ending the step; a second one ends at once\n"


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signals.check()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_what_a_library_makes_of_an_interruption_counts_as_one() -> None:
    def action(signals: Signals) -> int:
        try:
            signal.raise_signal(signal.SIGHUP)
        except KeyboardInterrupt:
            raise ImportError("cannot be imported") from None
        return 0

    assert run_command(action) == 128 + signal.SIGHUP


def test_on_another_thread_nothing_is_taken() -> None:
    found: list[object] = []

    def work() -> None:
        found.append(run_command(lambda signals: 0))
        found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0, signal.SIG_DFL]


def test_errors_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    def user(signals: Signals) -> int:
        raise UserError("the flag \x1b[31mis wrong")

    def inner(signals: Signals) -> int:
        raise KeyError("x")

    assert (run_command(user), run_command(inner)) == (2, 1)
    first, second = capfd.readouterr().err.splitlines()
    assert first == "error: the flag \\x1b[31mis wrong"
    assert second.startswith("error: KeyError: 'x' (set REGATTA_TRACEBACK=1")


def child(code: str, **streams: object) -> subprocess.CompletedProcess[str]:
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    command = [sys.executable, "-c", PREAMBLE + code]
    return subprocess.run(command, text=True, check=False, **settings)  # type: ignore[call-overload]


def test_a_second_signal_ends_at_once() -> None:
    done = child(
        "import signal, time\n"
        "from predict.cli.command import run_command\n"
        "def action(signals):\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGTERM)\n"
        "    finally:\n"
        "        signal.raise_signal(signal.SIGHUP)\n"
        "        time.sleep(60)\n"
        "sys.exit(run_command(action))\n"
    )
    assert done.returncode == 128 + signal.SIGHUP


def test_importing_paddle_leaves_our_handlers() -> None:
    done = child(
        "import signal\n"
        "from predict.cli.command import run_command\n"
        "from predict.device.library import import_paddle\n"
        "def action(signals):\n"
        "    import_paddle()\n"
        "    signal.raise_signal(signal.SIGTERM)\n"
        "    return 0\n"
        "sys.exit(run_command(action))\n"
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "interrupted\n")


def test_streams_that_are_closed_or_full_do_not_fail(tmp_path: Path) -> None:
    code = (
        "from predict.system import console\n"
        "from predict.cli.command import run_command\n"
        "from pathlib import Path\n"
        "def action(signals):\n"
        "    print('a library', file=sys.stderr, flush=sys.argv[1] == 'closed')\n"
        "    console.say('said')\n"
        "    for _ in range(3): console.show('shown')\n"
        f"    with open({str(tmp_path / 'file')!r}, 'w') as file: file.write(str(file.fileno()))\n"
        "    return 0\n"
        "sys.exit(run_command(action))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + code)
    for redirection in (">&- 2>&-", ">/dev/full 2>/dev/full", "<&- >&- 2>&-"):
        kind = "closed" if "&-" in redirection else "full"
        command = f"exec {sys.executable} {script} {kind} {redirection}"
        assert subprocess.run(["bash", "-c", command], check=False).returncode == 0, redirection
        assert int((tmp_path / "file").read_text()) > 2  # no file took a stream's number


def test_a_pipe_that_nobody_reads_silences_the_console() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = (
        "from predict.system import console\n"
        "from predict.cli.command import run_command\n"
        "from predict.system.progress import Progress\n"
        "def action(signals):\n"
        "    with Progress(3, enabled=True) as bar:\n"
        "        for _ in range(3):\n"
        "            bar.on_finished()\n"
        "            bar.print('text')\n"
        "    console.say('said')\n"
        "    return 0\n"
        "sys.exit(run_command(action))\n"
    )
    assert child(code, stdout=writing, stderr=writing).returncode == 0
    os.close(writing)


def test_control_characters_of_strangers_are_spelled_out() -> None:
    assert console.visible("a\x1b[2J\tb\n\x9b\u202e") == "a\\x1b[2J\tb\n\\x9b\\u202e"
