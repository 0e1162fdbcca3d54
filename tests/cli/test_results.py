"""Results on their way to the disk: the journal, the output made of it, streams, full disks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from predict.cli.results import JournaledResults, StreamedResults, open_results
from predict.errors import UserError
from predict.system.outputs import check_output, locked, stream_number, write_whole

INPUTS = {"seed": 0, "prompts of --data_file": "abc"}
ROOT = Path(__file__).resolve().parents[2]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


class Said(list[str]):
    """What was said."""

    def __call__(self, message: str) -> None:
        self.append(message)


def opened(path: Path, count: int, resume: bool = False, say: Said | None = None) -> Any:
    found = open_results(path, count, lambda: INPUTS, resume, say if say is not None else Said())
    assert isinstance(found, JournaledResults)
    return found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out.json"


def journal_of(out: Path) -> Path:
    return out.with_name("out.json.journal")


def interrupted(out: Path, count: int, *indices: int) -> Path:
    """The journal of a run that finished these prompts."""
    results = opened(out, count)
    for index in indices:
        results.put(index, {"output": index})
    results.close()
    return journal_of(out)


def test_answers_are_in_the_journal_as_they_finish_and_in_the_output_in_order(out: Path) -> None:
    out.write_text("old\n")
    results = opened(out, 3)
    for number, index in enumerate((2, 0, 1), 1):
        results.put(index, {"output": f"{index} 你好\n\u2028"})
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
        whole.put(index, {"output": index, "src": "é"})
    assert whole.finish()
    expected = out.read_bytes()
    out.unlink()
    results = opened(out, 4)
    for index in (3, 1):
        results.put(index, {"output": index, "src": "é"})
    results.close()
    say = Said()
    results = opened(out, 4, resume=True, say=say)
    assert results.done == {1, 3}
    assert "2 of 4 results are kept" in say[0]
    for index in (2, 0):
        results.put(index, {"output": index, "src": "é"})
    assert results.finish()
    assert out.read_bytes() == expected


@pytest.mark.parametrize("cut", range(1, 42, 8))
def test_a_line_that_was_cut_short_runs_again(out: Path, cut: int) -> None:
    path = interrupted(out, 3, 2, 0)
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - min(cut, 31))
    results = opened(out, 3, resume=True)
    assert results.done == {2}
    results.put(0, {"output": "again"})
    results.put(1, {"output": 1})
    assert results.finish()
    assert [line["output"] for line in lines(out)] == ["again", 1, 2]


@pytest.mark.parametrize("size", [0, 10])
def test_a_journal_without_a_whole_header_has_no_answers(out: Path, size: int) -> None:
    path = interrupted(out, 2, 0)
    os.truncate(path, size)
    say = Said()
    results = opened(out, 2, resume=True, say=say)
    assert results.done == frozenset()
    assert "holds no answers; all 2 prompts run" in say[0]
    results.close()


def edited(path: Path, change: Callable[[list[bytes]], None]) -> None:
    content = path.read_bytes().splitlines(keepends=True)
    change(content)
    path.write_bytes(b"".join(content))


DAMAGES: dict[str, tuple[Callable[[list[bytes]], None], str]] = {
    "no JSON": (lambda c: c.insert(1, b"{]\n"), "line 2 of .*not valid JSON"),
    "index beyond": (
        lambda c: c.append(b'{"index": 9, "result": {}}\n'),
        "line 4 of .*of prompt 9, and there are 3",
    ),
    "index below": (lambda c: c.append(b'{"index": -1, "result": {}}\n'), "of prompt -1"),
    "index no number": (lambda c: c.append(b'{"index": true, "result": {}}\n'), "not a result"),
    "a list": (lambda c: c.append(b"[]\n"), "not a result"),
    "twice": (lambda c: c.append(c[1]), "prompt 0 is in the journal twice"),
    "other spacing": (lambda c: c.append(b'{"index":2,"result":{}}\n'), "not written by this"),
    "result no object": (lambda c: c.append(b'{"index": 2, "result": 3}\n'), "not written by this"),
    "no header": (lambda c: c.__delitem__(0), "is not the journal of a run"),
    "newer format": (
        lambda c: c.__setitem__(0, c[0].replace(b'_journal": 1', b'_journal": 2')),
        "has format 2, and this version goes on with format 1",
    ),
    "other flags": (
        lambda c: c.__setitem__(0, c[0].replace(b'"seed": 0', b'"seed": 1')),
        "--seed was 1 and is 0",
    ),
    "other prompts": (
        lambda c: c.__setitem__(0, c[0].replace(b"abc", b"abd")),
        "the prompts of --data_file changed",
    ),
    "other count": (
        lambda c: c.__setitem__(0, c[0].replace(b'prompts": 3', b'prompts": 4')),
        "had 4 prompts and has 3",
    ),
    "deeply nested": (
        lambda c: c.append(b'{"index": 2, "result": ' + b"[" * 9999 + b"\n"),
        "nested too deeply|not valid",
    ),
    "not UTF-8": (lambda c: c.append(b'{"index": 2, "result": {"\xff": 1}}\n'), "not UTF-8"),
}


@pytest.mark.parametrize("name", list(DAMAGES))
def test_a_damaged_or_foreign_journal_is_refused_and_stays(out: Path, name: str) -> None:
    change, said = DAMAGES[name]
    path = interrupted(out, 3, 0, 1)
    edited(path, change)
    content = path.read_bytes()
    with pytest.raises(UserError, match=said):
        opened(out, 3, resume=True)
    assert path.read_bytes() == content
    say = Said()
    opened(out, 3, say=say).close()  # begins anew
    assert path.with_name("out.json.journal.1").read_bytes() == content
    assert "they are kept in" in say[0]


def test_a_journal_is_no_way_into_other_files(out: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for make in (os.symlink, os.link, lambda victim, path: os.mkfifo(path)):
        make(victim, journal_of(out))
        for resume in (True, False):
            if make is os.link and not resume:
                continue  # renamed, as any file with a content is
            with pytest.raises(
                UserError, match=r"a link, a folder or a device|kept|not the journal"
            ):
                opened(out, 2, resume=resume)
        journal_of(out).unlink()
    assert victim.read_text() == "precious"


def test_the_journal_and_the_output_have_the_old_output_s_permissions(out: Path) -> None:
    out.write_text("old")
    out.chmod(0o600)
    results = opened(out, 1)
    assert journal_of(out).stat().st_mode & 0o777 == 0o600
    results.put(0, {})
    assert results.finish()
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_link_stays_a_link_and_its_file_is_replaced(out: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    out.symlink_to(folder / "real.json")
    results = opened(out, 1)
    assert (folder / "real.json.journal").exists()
    results.put(0, {"output": 1})
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


def test_what_the_journal_does_not_take_is_rescued_and_still_makes_the_output(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    say = Said()
    results = opened(out, 3, say=say)
    results.put(2, {"output": 2})
    full_after(journal_of(out), 5, monkeypatch)
    results.put(0, {"output": 0})
    assert len(lines(journal_of(out))) == 2  # the half line is taken back
    results.put(1, {"output": 1})
    (rescue,) = tmp_path.glob("regatta-rescue-*.jsonl")
    assert [line["index"] for line in lines(rescue)] == [0, 1]
    assert "No space left on device" in say[0]
    assert str(rescue) in say[0]
    assert results.finish()
    assert [line["output"] for line in lines(out)] == [0, 1, 2]
    assert not rescue.exists()


def test_a_rescue_file_can_be_joined_to_the_journal(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = opened(out, 3)
    results.put(2, {"output": 2})
    with monkeypatch.context() as patch:
        full_after(journal_of(out), 5, patch)
        results.put(0, {"output": 0})
        results.close()
    (rescue,) = tmp_path.glob("regatta-rescue-*.jsonl")
    assert f"the last of them in {rescue}. Make room, append those lines" in results.kept
    with journal_of(out).open("ab") as file:
        file.write(rescue.read_bytes())
    assert opened(out, 3, resume=True).done == {0, 2}


def test_results_are_printed_when_no_disk_has_room(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: (os.open("/dev/full", os.O_WRONLY), "f"))
    results: Any = opened(out, 1)
    full_after(journal_of(out), 0, monkeypatch)
    results.put(0, {"output": "kept \x1b\x9b"})
    assert not results.finish()
    printed = capsys.readouterr().out
    assert json.loads(printed) == {"index": 0, "result": {"output": "kept \x1b\x9b"}}
    assert printed.isascii()
    assert not out.exists()
    streamed = StreamedResults(Path("/dev/full"), 1, Said())
    streamed.put(0, {"output": "kept"})
    assert not streamed.finish()
    assert json.loads(capsys.readouterr().out) == {"output": "kept"}


def test_a_disk_that_is_full_at_the_end_keeps_the_journal_and_the_old_output(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.write_text("old")
    say = Said()
    results = opened(out, 1, say=say)
    results.put(0, {"output": 0})

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        assert not results.finish()
    assert "No space left" in say[-1]
    assert "1 of 1 results are kept in" in say[-1]
    assert out.read_text() == "old"
    assert not list(out.parent.glob(".*.part"))
    assert opened(out, 1, resume=True).finish()
    assert lines(out) == [{"output": 0}]


def test_a_full_device_sends_the_results_to_a_rescue_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    say = Said()
    results = StreamedResults(Path("/dev/full"), 3, say)
    for index in (1, 0, 2):
        results.put(index, {"output": index})
    assert not results.finish()
    (rescue,) = tmp_path.glob("regatta-rescue-*.jsonl")
    assert [line["output"] for line in lines(rescue)] == [0, 1, 2]
    assert len(say) == 1
    assert "No space left on device" in say[0]
    assert str(rescue) in say[0]


def test_a_pipe_gets_results_in_order_as_soon_as_they_are_due(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    results = open_results(pipe, 4, dict, False, Said())
    for index, expected in ((2, []), (0, [0]), (3, [])):
        results.put(index, {"output": index})
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


def test_a_stream_cannot_be_resumed() -> None:
    with pytest.raises(UserError, match="/dev/null is none; leave --resume out"):
        open_results("/dev/null", 1, dict, True, Said())


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
        "    results.put(0, {'output': 'x'})\n"
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
    results = opened(out, 100)

    def sync(descriptor: int) -> None:
        synced.append(threading.get_ident())

    monkeypatch.setattr(os, "fdatasync", sync)
    for index in range(30):
        now[0] += 0.125
        results.put(index, {})
        if results._journal._syncing is not None:
            results._journal._syncing.join()
    assert len(synced) == 3
    assert threading.get_ident() not in synced
    results.close()
    assert synced[3:] == [threading.get_ident()]


def test_lines_that_do_not_reach_the_disk_are_an_error(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    say = Said()
    results = opened(out, 2, say=say)
    results.put(0, {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", failing_sync)
        results._journal._sync()
    results.put(1, {})
    assert "Input/output error" in say[0]
    assert "regatta-rescue-" in say[0]
    assert results.finish()  # all of it could still be read, and was written anew


def failing_sync(descriptor: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_hard_link_to_a_model_s_file_is_no_output(tmp_path: Path, out: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    os.link(model / "model.safetensors", out)
    with pytest.raises(UserError, match="lies in the folder of --model_name_or_path"):
        check_output("output_file", out, folders={"model_name_or_path": model})


def test_a_folder_with_any_config_json_is_no_model(tmp_path: Path, out: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    check_output("output_file", out)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(UserError, match="holds a model"):
        check_output("output_file", out)


def test_output_paths_that_cannot_work_are_refused_early(tmp_path: Path, out: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("{}")
    link = tmp_path / "link.json"
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(UserError, match="is the file of --data_file, too"):
            check_output("output_file", path, files={"data_file": file})
    with pytest.raises(UserError, match="is a directory"):
        check_output("output_file", tmp_path)
    with pytest.raises(UserError, match=r"missing does not exist; create it first"):
        check_output("output_file", tmp_path / "missing" / "out.json")
    check_output("output_file", out, files={"data_file": file})
    assert not out.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_protected_output_file_is_refused(out: Path) -> None:
    out.write_text("")
    out.chmod(0o400)
    with pytest.raises(UserError, match="permission denied"):
        check_output("output_file", out)
