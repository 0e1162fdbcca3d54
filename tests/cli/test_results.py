"""Results on their way to the disk: the journal, the output made of it, streams, full disks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from predict.cli.results import JournaledResults, Results, open_results, result_bytes
from predict.errors import UserError
from predict.system.outputs import check_output, locked, stream_number, write_whole

INPUTS = {"seed": 0, "prompts of --data_file": "abc"}
ROOT = Path(__file__).resolve().parents[2]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def opened(
    path: Path, count: int, resume: bool = False, said: list[str] | None = None
) -> JournaledResults:
    heard: list[str] = [] if said is None else said
    found = open_results(path, count, lambda: INPUTS, resume, heard.append)
    assert isinstance(found, JournaledResults)
    return found


def put(results: Results, index: int, output: object, **more: object) -> None:
    results.put(index, result_bytes({"output": output, **more}))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


def journal_of(out: Path) -> Path:
    return out.with_name("out.json.journal")


def interrupted(out: Path, count: int, *indices: int) -> Path:
    """The journal of a run that finished these prompts."""
    results = opened(out, count)
    for index in indices:
        put(results, index, index)
    results.close()
    return journal_of(out)


def test_answers_are_in_the_journal_as_they_finish_and_in_the_output_in_order(out: Path) -> None:
    out.write_text("old\n")
    results = opened(out, 3)
    for number, index in enumerate((2, 0, 1), 1):
        put(results, index, f"{index} 你好\n\u2028")
        assert len(journal_of(out).read_bytes().splitlines()) == 1 + number
        assert lines(journal_of(out))[-1]["index"] == index
        assert out.read_text() == "old\n"
    assert results.finish()
    assert [line["output"] for line in lines(out)] == [
        f"{index} 你好\n\u2028" for index in range(3)
    ]
    assert not journal_of(out).exists()


def test_a_run_without_answers_leaves_no_journal(out: Path) -> None:
    interrupted(out, 3)
    assert not journal_of(out).exists()


def test_a_resumed_run_writes_what_an_uninterrupted_one_does(out: Path) -> None:
    whole = opened(out, 4)
    for index in range(4):
        put(whole, index, index, src="é")
    assert whole.finish()
    expected = out.read_bytes()
    out.unlink()
    results = opened(out, 4)
    for index in (3, 1):
        put(results, index, index, src="é")
    results.close()
    said: list[str] = []
    results = opened(out, 4, resume=True, said=said)
    assert results.done == {1, 3}
    assert "2 of 4 results are kept" in said[0]
    for index in (2, 0):
        put(results, index, index, src="é")
    assert results.finish()
    assert out.read_bytes() == expected


def test_a_resumed_run_answers_again_what_had_failed(out: Path) -> None:
    results = opened(out, 3)
    for index, more in ((2, {"error": "broke"}), (1, {}), (0, {"error": "broke"})):
        put(results, index, index, **more)
    results.close()
    said: list[str] = []
    for done, outputs in (({1}, {0: "now"}), ({0, 1}, {2: "late"})):
        results = opened(out, 3, resume=True, said=said)
        assert results.done == done
        for index, output in outputs.items():
            put(results, index, output)
        results.close()
    assert ["2 prompts run (2 of them failed before)" in said[0], "(1 of them" in said[1]] == [1, 1]
    assert opened(out, 3, resume=True).finish()
    assert lines(out) == [{"output": output} for output in ("now", 1, "late")]


@pytest.mark.parametrize("cut", range(1, 42, 8))
def test_a_line_that_was_cut_short_runs_again(out: Path, cut: int) -> None:
    path = interrupted(out, 3, 2, 0)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - min(cut, 31))
    results = opened(out, 3, resume=True)
    assert results.done == {2}
    put(results, 0, "again")
    put(results, 1, 1)
    assert results.finish()
    assert [line["output"] for line in lines(out)] == ["again", 1, 2]


@pytest.mark.parametrize(
    "line",
    [
        b'{"index":2,"result":{}}',
        b'{"index": 2, "result": 3}',
        b'{"index": 2, "result": {}, "more": {}}',
        b"[]",
        b'{"index": true, "result": {}}',
    ],
)
def test_a_line_that_no_run_wrote_is_refused_and_the_journal_stays(out: Path, line: bytes) -> None:
    path = interrupted(out, 3, 0, 1)
    content = path.read_bytes() + line + b"\n"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"line 4 of .* is damaged"):
        opened(out, 3, resume=True)
    said: list[str] = []
    opened(out, 3, said=said).close()  # begins anew
    assert path.with_name("out.json.journal.1").read_bytes() == content
    assert "they are kept in" in said[0]


def test_the_journal_and_the_output_have_the_old_output_s_permissions(out: Path) -> None:
    out.write_text("old")
    out.chmod(0o600)
    results = opened(out, 1)
    assert journal_of(out).stat().st_mode & 0o777 == 0o600
    put(results, 0, 0)
    assert results.finish()
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_a_link_and_its_file_is_replaced(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    out.symlink_to(folder / "real.json")
    results = opened(out, 1)
    assert (folder / "real.json.journal").exists()
    put(results, 0, 1)
    assert results.finish()
    assert out.is_symlink()
    assert lines(folder / "real.json") == [{"output": 1}]


def full_after(path: Path, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes writes to a file fail once it has taken `room` more bytes, as on a full disk."""
    real_write = os.write
    identity = os.stat(path)
    left = [room]

    def write(descriptor: int, content: bytes) -> int:
        if not os.path.samestat(os.fstat(descriptor), identity):
            return real_write(descriptor, content)
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        content = content[: left[0]]
        left[0] -= len(content)
        return real_write(descriptor, content)

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("room", [0, 5])
def test_what_a_full_disk_does_not_take_waits_for_room(
    out: Path, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    results = opened(out, 4, said=said)
    put(results, 2, 2)
    with monkeypatch.context() as patch:
        full_after(journal_of(out), room, patch)
        put(results, 0, 0)
        put(results, 3, 3)
        assert len(said) == 1
        assert "No space left on device; answers wait in memory" in said[0]
        assert results.kept.startswith("1 of 4 results are kept in")
    put(results, 1, 1)
    assert [line["index"] for line in lines(journal_of(out))[1:]] == [2, 0, 3, 1]
    assert results.finish()
    assert [line["output"] for line in lines(out)] == [0, 1, 2, 3]


def test_what_finds_no_room_to_the_end_is_printed_and_runs_again(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    results = opened(out, 2, said=said)
    put(results, 1, 1)
    with monkeypatch.context() as patch:
        full_after(journal_of(out), 5, patch)
        put(results, 0, "kept \x1b\x9b")
        assert not results.finish()
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"index": 0, "result": {"output": "kept \x1b\x9b"}}
    assert printed.isascii()
    assert "1 of 2 results are kept in" in said[-1]
    assert not out.exists()
    assert opened(out, 2, resume=True).done == {1}


def test_a_full_device_has_its_results_printed(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    results = open_results("/dev/full", 3, dict, False, said.append)
    for index in (1, 0, 2):
        put(results, index, index)
    assert not results.finish()
    printed = [json.loads(line)["output"] for line in capsys.readouterr().out.splitlines()]
    assert printed == [0, 1, 2]
    assert len(said) == 1
    assert "/dev/full cannot be written: No space left on device" in said[0]
    assert results.kept == "0 of 3 results are in /dev/full"


def test_a_disk_that_is_full_at_the_end_keeps_the_journal_and_the_old_output(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.write_text("old")
    said: list[str] = []
    results = opened(out, 1, said=said)
    put(results, 0, 0)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not results.finish()
    assert "No space left" in said[-1]
    assert "1 of 1 results are kept in" in said[-1]
    assert out.read_text() == "old"
    assert not list(out.parent.glob(".*.part"))
    assert opened(out, 1, resume=True).finish()
    assert lines(out) == [{"output": 0}]


def test_a_pipe_gets_results_in_order_as_soon_as_they_are_due(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    results = open_results(pipe, 4, dict, False, print)
    for index, expected in ((2, []), (0, [0]), (3, [])):
        put(results, index, index)
        assert [json.loads(line)["output"] for line in received(reading)] == expected
    results.close()  # interrupted: what waits comes
    assert [json.loads(line)["output"] for line in received(reading)] == [2, 3]
    assert results.kept == f"3 of 4 results are in {pipe}"
    os.close(reading)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pipe"]


def received(reading: int) -> list[bytes]:
    try:
        return os.read(reading, 1 << 16).splitlines()
    except BlockingIOError:
        return []


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_stdout_gets_results_and_the_file_behind_it_stays(tmp_path: Path, name: str) -> None:
    target = tmp_path / "log.txt"
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from predict.cli.results import open_results\n"
        "from predict.system.outputs import locked, check_output\n"
        f"check_output('output_file', {name!r})\n"
        f"with locked('output_file', {name!r}):\n"
        f"    results = open_results({name!r}, 1, dict, False, print)\n"
        "    print('first', flush=True)\n"
        '    results.put(0, b\'{"output": "x"}\')\n'
        "    results.finish()\n"
        "    print('last')\n"
    )
    with target.open("wb") as file:
        subprocess.run([sys.executable, "-c", code], stdout=file, check=True)
    assert target.read_text() == 'first\n{"output": "x"}\nlast\n'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.txt"]


def test_only_this_process_s_streams_are_streams(tmp_path: Path) -> None:
    assert stream_number(Path("/dev/stderr")) == 2
    assert stream_number(Path(f"/proc/{os.getppid()}/fd/1")) is None
    assert stream_number(tmp_path / "1") is None


def test_what_a_killed_run_left_half_written_is_cleared_by_the_next(out: Path) -> None:
    half = out.with_name(".out.json.abc.part")
    half.write_text("half")
    other = out.with_name(".out.jsonl.abc.part")
    other.write_text("another's")
    with locked("output_file", out):
        assert not half.exists()
    assert other.exists()


def test_the_output_is_written_in_pieces(out: Path) -> None:
    write_whole(out, iter([b"a", b"b"]))
    assert out.read_bytes() == b"ab"

    def failing() -> Any:
        yield b"half"
        raise OSError(errno.EIO, "gone")

    with pytest.raises(OSError, match="gone"):
        write_whole(out, failing())
    assert out.read_bytes() == b"ab"
    assert [path.name for path in out.parent.iterdir()] == ["out.json"]


def test_the_disk_is_asked_once_a_second_and_nobody_waits_for_it(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    synced: list[int] = []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "fdatasync", lambda _: synced.append(threading.get_ident()))
    results = opened(out, 100)
    for index in range(30):
        now[0] += 0.125
        put(results, index, index)
        results._journal._syncing.join()
    assert len(synced) == 4  # its name, and three times
    assert threading.get_ident() not in synced
    results.close()
    assert synced[4:] == [threading.get_ident()]


def test_a_disk_that_fails_is_said(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_sync(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    said: list[str] = []
    results = opened(out, 1, said=said)
    put(results, 0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing_sync)
        results.close()
    assert "may not be whole on the disk: Input/output error" in said[0]
    results.close()  # does nothing
    assert len(said) == 1


def test_a_folder_with_any_config_json_is_no_model(tmp_path: Path, out: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_output("output_file", out)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match="holds a model"):
        check_output("output_file", out)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_protected_output_file_is_refused(out: Path) -> None:
    out.write_text("")
    out.chmod(0o400)
    with pytest.raises(UserError, match="permission denied"):
        check_output("output_file", out)
