"""Data files with pictures: marks in texts, paths below the file, base64; checked by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predict import LLM, SamplingParams
from predict.cli.data import located, read_data_file
from predict.cli.prompts import Prompts, prepare_prompts
from predict.config.engine import EngineConfig
from predict.device import library
from predict.errors import UserError
from predict.loading.model import read_spec
from predict.predictor import main
from predict.sight import reader_of
from predict.text.tokenizer import Tokenizer
from tests.support.pictures import GOLDEN_IMAGES, SIZES, drawn, png_url

FOLDER = GOLDEN_IMAGES / "qwen2_5_vl"
URL = png_url(drawn(0, SIZES[0]))
MESSAGES = [{"role": "user", "content": "<image>a<image>"}]


def data_file(folder: Path, *lines: Any) -> Path:
    """A data file beside a folder with two pictures."""
    (folder / "in").mkdir()
    for number in (0, 3):
        drawn(number, SIZES[number]).save(folder / "in" / f"{number}.png")
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prepared(path: Path, max_length: int = 256) -> Prompts:
    config = EngineConfig(model_name_or_path=str(FOLDER))
    spec = read_spec(FOLDER)[0]
    items = read_data_file(path)
    tokenizer = Tokenizer.from_dir(FOLDER)
    return prepare_prompts(items, tokenizer, 20, max_length, lambda: reader_of(config, spec))


def test_pictures_stand_where_lines_say(tmp_path: Path) -> None:
    coded = URL.partition(",")[2]
    part = {"type": "image_url", "image_url": {"url": "in/3.png"}}
    path = data_file(
        tmp_path,
        {"src": "<image>a", "images": "in/0.png"},
        {"messages": MESSAGES, "images": ["in/0.png", coded]},
        {"src": [{"role": "user", "content": [part, {"type": "text", "text": "<image>"}]}],
         "images": [URL]},
        {"src": "what is <image>?"},
    )  # fmt: skip
    prompts = prepared(path)
    placed = [seen.placed if seen else () for seen in prompts.pictures]
    counts = [[each.picture.num_tokens for each in of_line] for of_line in placed]
    assert counts == [[45], [45, 45], [42, 45], []]
    for ids, count in zip(prompts.token_ids, counts, strict=True):
        assert isinstance(ids, list)
        assert ids.count(261) == sum(count)
    digests = {each.picture.digest for of_line in placed for each in of_line}
    assert len(digests) == 2


def test_short_pictures_in_base64_are_no_names_of_files(tmp_path: Path) -> None:
    """As long as no name may be, and shorter than a path."""
    coded = png_url(drawn(0, (9, 9))).partition(",")[2].replace("/", "+")
    assert 255 < len(coded) < 4096
    assert isinstance(located(coded, tmp_path), bytes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"src": "a", "images": "in/0.png"}, "0 times <image>, and images has 1"),
        ({"src": "<image>", "images": ["in/0.png"] * 2}, "1 times <image>, and images has 2"),
        ({"src": "<image>", "images": "in/1.png"}, "cannot read .*1.png"),
        (
            {"src": "<image>", "images": "../secret.png"},
            "not lie below the data file's folder",
        ),
        ({"src": "<image>", "images": "/etc/passwd"}, "does not lie below"),
        ({"src": "<image>", "images": "http://host/a.png"}, "none is fetched"),
        ({"src": "<image>", "images": 7}, "a picture is 7"),
        ({"src": "<image>", "images": "in/a\0.png"}, "has no path"),
        ({"src": "<image>", "images": "%" * 300}, "cannot read .*File name too long"),
        ({"src": [{"role": "user", "content": [{"type": []}]}]}, "message 1"),
        (
            {
                "src": [
                    {"role": "user", "content": [{"type": "image", "image": URL, "max_pixels": 9}]}
                ]
            },
            "a part image has the key 'max_pixels'",
        ),
        ({"src": "<image>", "images": "prompts.jsonl"}, "picture 1 of the prompt is no picture"),
        ({"src": "<|image_pad|><image>", "images": URL}, "2 placeholders .* 1 pictures"),
        ({"src": "<image>a" * 6, "images": [URL] * 6}, "raise --max_length above"),
    ],
)
def test_wrong_lines_are_named(line: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        prepared(data_file(tmp_path, {"src": "a"}, line))
    assert "line 2 of prompts.jsonl" in str(error.value)


def test_runs_over_data_files_have_pictures(tmp_path: Path, compiled: library.Library) -> None:
    path = data_file(tmp_path, {"src": "<image>a", "images": "in/0.png"}, {"src": "b"})
    out = tmp_path / "out.jsonl"
    words: dict[str, Any] = {"model_name_or_path": FOLDER, "data_file": path, "output_file": out}
    words |= {"max_length": "128", "max_new_tokens": "8", "decode_strategy": "greedy_search"}
    assert main([word for k, v in words.items() for word in (f"--{k}", str(v))]) == 0
    got = [json.loads(line)["output"] for line in out.read_text().splitlines()]
    content = [{"type": "image", "image": drawn(0, SIZES[0])}, {"type": "text", "text": "a"}]
    params = SamplingParams(temperature=0.0, max_new_tokens=8)
    llm = LLM(str(FOLDER), max_length=128)
    chats = [[{"role": "user", "content": each}] for each in (content, "b")]
    assert got == [output.text for output in llm.chat(chats, params)]


def test_models_without_eyes_refuse_pictures_by_line(tmp_path: Path) -> None:
    items = read_data_file(data_file(tmp_path, {"src": "<image>", "images": URL}))
    with pytest.raises(UserError, match=r"line 1 .* has 1 pictures, and this model reads text"):
        prepare_prompts(items, Tokenizer.from_dir(FOLDER), 20, 256)
