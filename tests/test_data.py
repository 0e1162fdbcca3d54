"""Data files, prompts and the result file."""

from __future__ import annotations

import errno
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from predict import data
from predict.data import DataItem, ResultWriter, check_output_path, read_data_file
from predict.errors import UserError
from predict.prompts import prepare_prompts
from predict.tokenizer import Tokenizer

FOLDER = Path(__file__).parent / "data" / "tokenizers" / "byte_level"


def written(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "prompts.jsonl"


GOOD = '{"src": "a", "tgt": "t"}'


@pytest.mark.parametrize(
    "content",
    [
        f'{GOOD}\n{{"src": "b"}}\n',
        f'\n{GOOD}\r\n\r\n  {{"src": "b", "tgt": null, "id": 7}}',
        f'\ufeff{GOOD}\n{{"src": "b"}}\n',
        f'[{GOOD}, {{"src": "b"}}]',
        f'\ufeff [\n {GOOD},\n {{"src": "b"}}\n]\n',
    ],
    ids=["lines", "blank lines", "byte order mark", "list", "pretty list"],
)
def test_lines_and_lists_hold_the_same_prompts(file: Path, content: str) -> None:
    items = read_data_file(written(file, content))
    assert [(item.src, item.tgt) for item in items] == [("a", "t"), ("b", "")]


def test_conversations_are_kept_as_they_are(file: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"src": ["a", "c"], "tgt": ["b"]},
        {"src": [["a", "b"], ["c"]], "tgt": ""},
        {"src": [{"role": "user", "content": "a"}], "tgt": ""},
    ]
    items = read_data_file(written(file, "\n".join(map(json.dumps, lines))))
    assert [item.src for item in items] == [line["src"] for line in lines]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        (b"\xef\xbb\xbf\n", "is empty"),
        ("[]", "empty JSON list"),
        (f'{GOOD}\n{{"src": "b"\n', r"line 2 .*not valid JSON at column"),
        (f"{GOOD}\nplain text\n", r"line 2 .*not valid JSON at column 1.*near 'plain text'"),
        (f"{GOOD}\n\n3\n", r"line 3 .*it is a number; an object"),
        (f'{GOOD}\n{{"scr": "b"}}\n', r'line 2 .*no "src".*in place of .scr.'),
        (f'{GOOD}\n{{"text": "b"}}\n', r"line 2 .*keys: 'text'"),
        (f'{GOOD}\n{{"prompt": "b"}}\n', r"line 2 .*in place of .prompt."),
        (f'{GOOD}\n{{"src": 3}}\n', r'line 2 .*"src" is a number'),
        (f'{GOOD}\n{{"src": "b", "tgt": 0}}\n', r'line 2 .*"tgt" is a number'),
        (f'{GOOD}\n{{"src": ["b"], "tgt": [null]}}\n', r'"tgt" is a list with null in it'),
        (f'{GOOD}\n{{"src": "b", "src": "c"}}\n', r"line 2 .*the key 'src' twice"),
        (f'{GOOD}\n{{"src": "\\ud83d"}}\n', r"line 2 .*half of a surrogate pair"),
        (f'{GOOD}\n{{"src": "b", "seed": {"9" * 400}}}\n', r"line 2 .*number of 400 digits"),
        (f'{GOOD}\n{{"src": "b", "top_p": NaN}}\n', r"line 2 .*NaN, which is not JSON"),
        (f'{GOOD}\n{{"src": {"[" * 70}{"]" * 70}}}\n', r"line 2 .*nested too deeply"),
        (f'{GOOD}\n{{"src": ["a", "b"]}}\n', r"line 2 .*1 answers must be given"),
        (
            f'{GOOD}\n{{"src": "b", "tgt": {{}}, "x": 1}}\n{{"src": {{}}}}',
            r"line 2 .*so are line 3",
        ),
        (GOOD.encode() + b'\n{"src": "\xff"}', r"line 2 .*not UTF-8 text \(byte 10 is 0xff\)"),
        ('[{"src": "a"}, 3]', r"item 2 .*it is a number"),
        ('[{"src": "a"},\n {"src": }]', r"not valid JSON at line 2 column 10"),
        (b'[{"src": "\xff"}]', r"not UTF-8"),
        ("x\ny\nz\n", r"line 1 .*\(and so are line 2 of prompts.jsonl, line 3"),
        ("{\n}\n", r"line 1 .*not valid JSON"),
        ("[" * 100_000, r"nested too deeply"),
    ],
)
def test_malformed_files_are_refused_by_line(file: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_data_file(written(file, content))


def test_a_missing_data_file_is_named(file: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read --data_file .*No such file"):
        read_data_file(file)


def test_a_pipe_is_read_and_a_device_is_refused(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, GOOD.encode())
    os.close(write)
    assert [item.src for item in read_data_file(f"/dev/fd/{read}")] == ["a"]
    os.close(read)
    with pytest.raises(UserError, match=r"/dev/zero is a device"):
        read_data_file("/dev/zero")


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["temprature"], ["1 prompt has the key 'temprature'", "did you mean 'temperature'?"]),
        (["max_tokens", "max_tokens"], ["2 prompts have", "line 1 first", "'max_new_tokens'"]),
        (["maxtokens"], ["'max_new_tokens'"]),
        (["top-k"], ["'top_k'"]),
        (["TopP"], ["'top_p'"]),
        (["repetition_penality"], ["'repetition_penalty'"]),
        (["stop_words"], ["'stop'"]),
        (["messages"], ["'src'"]),
        (["tools"], ["no such feature"]),
        (["id"], None),
        (["source"], None),
        (["category"], None),
        (["label"], None),
        (["k"], None),
        (["top_k", "num_return_sequences", "best_of"], None),
    ],
)
def test_a_key_that_is_nearly_ours_is_warned_of_once(
    file: Path, tokenizer: Tokenizer, keys: list[str], said: list[str] | None
) -> None:
    lines = "".join(json.dumps({"src": "a", key: 1}) + "\n" for key in keys)
    items = read_data_file(written(file, lines))
    warnings = prepare_prompts(items, tokenizer, 64, 128).warnings
    assert len(warnings) == (said is not None)
    for word in said or ():
        assert word in warnings[0].replace(f" of {file.name}", "")


def test_many_unknown_keys_end_in_few_lines(file: Path, tokenizer: Tokenizer) -> None:
    value = {"src": "a"} | {f"temperatur{i}" + "x" * (i // 40) * 100: 1 for i in range(5000)}
    items = read_data_file(written(file, json.dumps(value)))
    warnings = prepare_prompts(items, tokenizer, 64, 128).warnings
    assert 1 < len(warnings) <= 11
    assert sum(map(len, warnings)) < 5000


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(FOLDER, chat_template="none")


@pytest.fixture(scope="module")
def chat_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(FOLDER)


def test_a_long_prompt_keeps_its_first_tokens_and_one_line_says_so(tokenizer: Tokenizer) -> None:
    items = [DataItem(f"line {i} of f", "hello world, how are you?" * i) for i in range(1, 7)]
    whole = [tokenizer.encode(str(item.src)) for item in items]
    length = len(whole[1])
    prompts = prepare_prompts(items, tokenizer, length, 10**6)
    assert prompts.token_ids == [ids[:length] for ids in whole]
    (warning,) = prompts.warnings
    cut = len(whole[2]) - length
    assert f"--src_length {length}: line 3 of f: {cut} of {len(whole[2])} tokens" in warning
    assert warning.endswith("and 1 more")


def test_a_prompt_that_fills_max_length_is_refused_with_both_numbers(tokenizer: Tokenizer) -> None:
    items = [DataItem("line 1 of f", "a"), DataItem("line 2 of f", "hello world")]
    length = len(tokenizer.encode("hello world"))
    assert prepare_prompts(items, tokenizer, 1024, length + 1).warnings == ()
    with pytest.raises(UserError, match=rf"line 2 of f has {length} tokens.*--max_length {length}"):
        prepare_prompts(items, tokenizer, 1024, length)


def test_a_prompt_without_tokens_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=r"line 4 of f: the prompt has no tokens"):
        prepare_prompts([DataItem("line 4 of f", "")], tokenizer, 8, 16)


def test_a_chat_template_is_applied_once_without_extra_specials(chat_tokenizer: Tokenizer) -> None:
    item = DataItem("line 1", "hello")
    (ids,) = prepare_prompts([item], chat_tokenizer, 1024, 2048).token_ids
    text = chat_tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|user|>user\nhello<|end|>\n<|user|>assistant\n"


def test_a_refusing_chat_template_names_the_line(tokenizer: Tokenizer) -> None:
    roles = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(UserError, match=r"line 9: role messages need a chat template"):
        prepare_prompts([DataItem("line 9", roles)], tokenizer, 1024, 2048)


def test_without_a_template_the_first_question_is_asked(tokenizer: Tokenizer) -> None:
    items = [DataItem("line 1", [["a", "b"], ["c"]]), DataItem("line 2", ["d"])]
    prompts = prepare_prompts(items, tokenizer, 1024, 2048)
    assert prompts.token_ids == [tokenizer.encode("a"), tokenizer.encode("d")]
    assert len(prompts.warnings) == 1
    assert "line 1" in prompts.warnings[0]
    assert "line 2" not in prompts.warnings[0]


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_results_appear_in_input_order_as_soon_as_they_are_due(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    due: list[int] = []
    writer = ResultWriter(path, 4, on_line=due.append)
    for index, expected in ((2, []), (0, [0]), (3, [0]), (1, [0, 1, 2, 3])):
        writer.put(index, {"output": index})
        assert due == expected
        assert [line["output"] for line in lines(path)] == expected
    writer.close()
    assert writer.failure is None


def test_an_interrupted_run_keeps_results_that_waited_for_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    writer = ResultWriter(path, 4)
    for index in (3, 0, 2):
        writer.put(index, {"output": index})
    writer.close()
    assert [line["output"] for line in lines(path)] == [0, 2, 3]
    assert writer.summary == f"3 of 4 results are in {path}"


def test_ctrl_c_in_the_middle_of_a_write_leaves_whole_lines(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    writer = ResultWriter(path, 2)
    real_write = os.write

    # A shell's background jobs start with the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted_write(descriptor: int, content: bytes) -> int:
        count = real_write(descriptor, content[:3])
        signal.raise_signal(signal.SIGINT)
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", interrupted_write)
        patch.setattr(data, "_interrupt_held", once(data._interrupt_held, patch, real_write))
        with pytest.raises(KeyboardInterrupt):
            writer.put(0, {"output": "a long enough line"})
    writer.close()
    assert lines(path) == [{"output": "a long enough line"}]


def once(held: Any, patch: pytest.MonkeyPatch, real_write: Any) -> Any:
    """Leaves `held` as it is, but lets only the first write raise the signal."""
    first = os.write

    def write(descriptor: int, content: bytes) -> int:
        patch.setattr(os, "write", real_write)
        return int(first(descriptor, content))

    patch.setattr(os, "write", write)
    return held


def test_text_that_json_can_hold_and_utf8_cannot_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    writer = ResultWriter(path, 1)
    writer.put(0, {"src": "\ud800", "output": "你好\n\u2028"})
    writer.close()
    content = path.read_text(encoding="utf-8")
    assert content.count("\n") == 1
    assert json.loads(content) == {"src": "\ud800", "output": "你好\n\u2028"}
    assert "你好" in content


def test_a_full_disk_sends_the_results_to_a_rescue_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    writer = ResultWriter("/dev/full", 3, warn=said.append)
    for index in (1, 0, 2):
        writer.put(index, {"output": index})
    writer.close()
    (rescue,) = tmp_path.glob("regatta-rescue-*.jsonl")
    assert [line["output"] for line in lines(rescue)] == [0, 1, 2]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert str(rescue) in said[0]


def test_a_half_written_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "out.json"
    writer = ResultWriter(path, 2)
    writer.put(0, {"output": 0})
    real_write = os.write
    room = [5]

    def short_write(descriptor: int, content: bytes) -> int:
        if descriptor == writer._file._descriptor:
            if not room[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            content, room[0] = content[: room[0]], 0
        return real_write(descriptor, content)

    monkeypatch.setattr(os, "write", short_write)
    writer.put(1, {"output": 1})
    writer.close()
    assert lines(path) == [{"output": 0}]
    (rescue,) = tmp_path.glob("regatta-rescue-*.jsonl")
    assert lines(rescue) == [{"output": 1}]


def test_results_are_printed_when_no_disk_has_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", lambda **_: (os.open("/dev/full", os.O_WRONLY), "f"))
    writer = ResultWriter("/dev/full", 1)
    writer.put(0, {"output": "kept"})
    writer.close()
    assert json.loads(capsys.readouterr().out) == {"output": "kept"}


def test_output_paths_that_cannot_work_are_refused_early(tmp_path: Path, file: Path) -> None:
    written(file, GOOD)
    link = tmp_path / "link.json"
    link.symlink_to(file)
    for path in (file, link):
        with pytest.raises(UserError, match="is the --data_file itself"):
            check_output_path(path, file, None)
    with pytest.raises(UserError, match="is a directory"):
        check_output_path(tmp_path)
    with pytest.raises(UserError, match=r"missing does not exist; create it first"):
        check_output_path(tmp_path / "missing" / "out.json")
    fresh = tmp_path / "out.json"
    check_output_path(fresh, file)
    assert not fresh.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_protected_output_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "out.json", "")
    path.chmod(0o400)
    with pytest.raises(UserError, match="permission denied"):
        check_output_path(path)
