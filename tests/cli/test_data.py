"""Data files, prompts and the result file."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from predict.cli import data
from predict.cli.data import DataItem, read_data_file
from predict.cli.prompts import prepare_prompts
from predict.errors import UserError
from predict.text.tokenizer import Tokenizer
from tests.support.tiny import TOKENIZER

DATA = Path(__file__).parents[1] / "data"


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
        (b"\xef\xbb\xbf\n", "is empty"),
        (f"{GOOD}\nplain text\n", r"line 2 .*not valid JSON at column 1.*near 'plain text'"),
        (f"{GOOD}\n\n3\n", r"line 3 .*it is a number; an object"),
        (f'{GOOD}\n{{"scr": "b"}}\n', r'line 2 .*no "src".*in place of .scr.'),
        (f'{GOOD}\n{{"text": "b"}}\n', r"line 2 .*keys: 'text'"),
        (f'{GOOD}\n{{"src": 3}}\n', r'line 2 .*"src" is a number'),
        (f'{GOOD}\n{{"src": ["b"], "tgt": [null]}}\n', r'"tgt" is a list with null in it'),
        (f'{GOOD}\n{{"src": ["a", "b"]}}\n', r"line 2 .*1 answers must be given"),
        (
            f'{GOOD}\n{{"src": "b", "tgt": {{}}, "x": 1}}\n{{"src": {{}}}}',
            r"line 2 .*so are line 3",
        ),
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


def test_a_pipe_is_read() -> None:
    read, write = os.pipe()
    os.write(write, GOOD.encode())
    os.close(write)
    assert [item.src for item in read_data_file(f"/dev/fd/{read}")] == ["a"]
    os.close(read)


def test_a_pipe_that_nobody_writes_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "prompts"
    os.mkfifo(pipe)
    monkeypatch.setattr(data, "WRITER_SECONDS", 0.0)
    with pytest.raises(UserError, match="prompts is a pipe that nobody writes to: none opened it"):
        read_data_file(pipe)


@pytest.mark.parametrize("waits", [False, True])
def test_a_pipe_is_read_to_its_end_whenever_its_writer_comes(tmp_path: Path, waits: bool) -> None:
    pipe = tmp_path / "prompts"
    os.mkfifo(pipe)

    def write() -> None:
        with pipe.open("w") as file:
            if waits:
                time.sleep(0.25)
            file.write(GOOD + "\n")
            file.flush()
            time.sleep(0.05)
            file.write(GOOD)

    writer = threading.Thread(target=write)
    writer.start()
    assert [item.src for item in read_data_file(pipe)] == ["a", "a"]
    writer.join()


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
    return Tokenizer.from_dir(TOKENIZER, chat_template="none")


@pytest.fixture(scope="module")
def chat_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TOKENIZER)


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


@pytest.mark.parametrize("template", ["none", "chatglm"])
def test_a_cut_prompt_of_the_first_chatglm_ends_as_its_prompts_do(template: str) -> None:
    tokenizer = Tokenizer.from_dir(DATA / "families" / "chatglm_6b", chat_template=template)
    items = [DataItem("line 1 of f", "hello world " * 9)]
    (whole,) = prepare_prompts(items, tokenizer, 10**6, 10**6).token_ids
    assert isinstance(whole, list)
    end = [tokenizer.token_to_id("[gMASK]"), tokenizer.token_to_id("<sop>")]
    assert whole[-2:] == end
    assert prepare_prompts(items, tokenizer, 9, 99).token_ids == [[*whole[:7], *end]]
    assert prepare_prompts(items, tokenizer, 2, 99).token_ids == [whole[:2]]


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
    assert isinstance(ids, list)
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
