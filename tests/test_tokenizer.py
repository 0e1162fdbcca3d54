"""Tokenizers against what Hugging Face transformers and sentencepiece do (tests/data/make.py)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from predict.errors import UserError
from predict.tokenizer import Tokenizer

DATA = Path(__file__).parent / "data"
FOLDERS = DATA / "tokenizers"
GOLDEN: dict[str, Any] = json.loads((DATA / "tokenizers.json").read_text(encoding="utf-8"))
CASES = [
    pytest.param(name, case, id=f"{name}-{case['text'][:12]!r}")
    for name, cases in GOLDEN["tokenizers"].items()
    for case in cases
]
NAMES = tuple(GOLDEN["tokenizers"])


@pytest.mark.parametrize(("name", "case"), CASES)
def test_ids_and_texts_are_those_of_transformers(name: str, case: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / name)
    assert tokenizer.encode(case["text"]) == case["ids"]
    assert tokenizer.encode(case["text"], add_special_tokens=False) == case["plain_ids"]
    assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded_all"]


def test_a_leading_space_is_encoded_as_sentencepiece_does() -> None:
    import sentencepiece

    path = FOLDERS / "sentencepiece" / "tokenizer.model"
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    tokenizer = Tokenizer.from_dir(path.parent)
    assert tokenizer.encode(" hello", add_special_tokens=False) == model.encode(" hello")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["hello world", "你好，世界 🙂", "a  b\n\n c", " leading"])
def test_decoding_undoes_encoding(name: str, text: str) -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / name)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ["hello world, and you?", "naïve 🙂 你好 end"])
def test_a_continuation_keeps_its_leading_space_and_split_characters(name: str, text: str) -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / name)
    ids = tokenizer.encode(text)
    for cut in range(2, len(ids)):
        prompt = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        assert prompt + tokenizer.decode_continuation(ids[:cut], ids[cut:]) == text


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_a_padded_vocabulary_have_no_text(name: str) -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / name)
    ids = tokenizer.encode("hello")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 10**6]) == "hello"


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_are_known_by_role(name: str) -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / name)
    assert tokenizer.bos_token_id == tokenizer.token_to_id("<s>")
    assert tokenizer.eos_token_ids == (tokenizer.token_to_id("</s>"),)
    assert tokenizer.pad_token_id is None
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.vocab_size == 1 + max(filter(None, map(tokenizer.token_to_id, ADDED)))


ADDED = ("<|user|>", "<|end|>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the byte-level tokenizer that a test may damage."""
    return shutil.copytree(FOLDERS / "byte_level", tmp_path / "model")


def test_eos_ids_come_from_all_three_files(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 1]}')
    (folder / "config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer.from_dir(folder).eos_token_ids == (1, 7, 9)


def test_bos_and_eos_follow_the_tokenizer_config(folder: Path) -> None:
    plain = Tokenizer.from_dir(folder).encode("hello")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"add_bos_token": True, "add_eos_token": True}))
    assert Tokenizer.from_dir(folder).encode("hello") == [0, *plain, 1]
    assert Tokenizer.from_dir(folder).encode("hello", add_special_tokens=False) == plain


def test_truncation_saved_in_the_file_does_not_cut_prompts(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    path.write_text(json.dumps(values), encoding="utf-8")
    assert len(Tokenizer.from_dir(folder).encode("hello world, how are you?")) > 2


def test_a_tokenizer_model_alone_is_enough(tmp_path: Path) -> None:
    shutil.copy(FOLDERS / "sentencepiece" / "tokenizer.model", tmp_path)
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("keep", [0, 200])
def test_a_damaged_file_is_named(folder: Path, name: str, keep: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:keep])
    with pytest.raises(UserError, match=name):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_damaged_sentencepiece_model_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer\.model.*copy it again"):
        Tokenizer.from_dir(tmp_path)


def test_a_folder_without_a_tokenizer_says_what_it_looked_for(tmp_path: Path) -> None:
    assert not Tokenizer.exists(tmp_path)
    with pytest.raises(UserError, match=r"tokenizer\.json, tokenizer\.model"):
        Tokenizer.from_dir(tmp_path)


def test_a_word_is_encoded_with_and_without_a_space_in_front() -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / "byte_level")
    variants = tokenizer.encode_word("hello")
    assert variants == tokenizer.encode_word("  hello ")
    texts = {tokenizer.decode([tokenizer.encode("x")[-1], *ids]) for ids in variants}
    assert "xhello" in texts
    assert texts <= {"xhello", "x hello"}


def test_a_sentencepiece_word_is_found_within_a_text_too() -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / "sentencepiece")
    variants = tokenizer.encode_word("hello")
    before = tokenizer.encode("you", add_special_tokens=False)
    texts = {tokenizer.decode([*before, *ids]) for ids in variants}
    assert texts == {"youhello", "you hello"}
