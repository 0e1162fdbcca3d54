"""Tokenizers against what Hugging Face transformers and sentencepiece do (tests/data/make.py)."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from predict.errors import TokenizerError, UserError
from predict.text.backends.base import quiet_panics
from predict.text.tokenizer import Tokenizer
from tests.support.limits import cpu_seconds

DATA = Path(__file__).parents[1] / "data"
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
    with pytest.raises(UserError, match=r"tokenizer\.json, qwen\.tiktoken, .*tokenizer\.model"):
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


DAMAGED = DATA / "damaged_tokenizers"  # keys of a tokenizer.json, each a panic of its library
AT_LOAD = sorted(path.stem for path in DAMAGED.glob("*.json") if path.stem != "panics_on_one_text")


def damage(folder: Path, name: str) -> Path:
    """Changes the keys of the folder's tokenizer.json that the file of this name has."""
    path = folder / "tokenizer.json"
    changes = json.loads((DAMAGED / f"{name}.json").read_text(encoding="utf-8"))
    values = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps(values), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", AT_LOAD)
def test_a_tokenizer_that_panics_is_refused_when_it_is_loaded(
    folder: Path, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"tokenizer\.json: its library panicked: .*copy it again"):
        Tokenizer.from_dir(damage(folder, name))
    assert "panicked at" not in capfd.readouterr().err


def test_a_panic_on_one_text_is_an_error_of_that_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_dir(damage(folder, "panics_on_one_text"))
    for _ in range(2):
        with pytest.raises(TokenizerError, match="a text of 40 characters: its library panicked"):
            tokenizer.encode("x" * 40)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


@pytest.mark.parametrize("name", NAMES)
def test_half_a_surrogate_pair_is_named(name: str) -> None:
    tokenizer = Tokenizer.from_dir(FOLDERS / name)
    with pytest.raises(TokenizerError, match=r"\\ud800 alone at character 3"):
        tokenizer.encode("ab\ud800c")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_what_is_no_failure_of_the_tokenizer_passes(error: BaseException) -> None:
    class Interrupted:
        vocab_size = 3

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            raise error

    with pytest.raises(type(error)):
        Tokenizer(Interrupted(), {}).encode("a")  # type: ignore[arg-type]


def test_what_a_library_prints_while_it_loads_is_passed_on_unless_it_panicked(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with quiet_panics():
        os.write(2, b"a warning")
    assert capfd.readouterr().err == "a warning"


@pytest.fixture
def sentencepiece_folder(tmp_path: Path) -> Path:
    """A copy of the sentencepiece tokenizer that a test may damage."""
    return shutil.copytree(FOLDERS / "sentencepiece", tmp_path / "model")


@pytest.mark.parametrize(
    ("decoder", "said"),
    [
        ([1], " is a list"),
        ({"-1": {"content": "x"}}, r"-1': the token id is '-1' .allowed: a whole number"),
        ({"1000000000": {"content": "x"}}, "the token id is '1000000000'"),
        ({"1.5": {"content": "x"}}, r"the token id is '1\.5'"),
        ({"٣": {"content": "x"}}, "the token id is"),
        ({"600": {}}, "600': content is null"),
        ({"600": "x"}, "600' is a text"),
        ({"600": {"content": 5}}, "content is a number"),
        ({"600": {"content": "x" * 513}}, "content is 513 characters"),
        ({"600": {"content": "x", "lstrip": "yes"}}, "lstrip is a text"),
    ],
)
def test_damaged_added_tokens_are_named(
    sentencepiece_folder: Path, decoder: Any, said: str
) -> None:
    path = sentencepiece_folder / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": decoder}))
    with pytest.raises(UserError, match=f"tokenizer_config.json: added_tokens_decoder.*{said}"):
        Tokenizer.from_dir(sentencepiece_folder)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token is a text"),
        ("tokenizer_config.json", {"legacy": 1}, "legacy is a number"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token is a number"),
        ("special_tokens_map.json", {"bos_token": {"content": []}}, "bos_token is an object"),
        ("added_tokens.json", {"<x>": 1.5}, "the token id is '1.5'"),
        ("added_tokens.json", {"<x>": True}, "the token id is 'True'"),
        ("generation_config.json", {"eos_token_id": [1, "2"]}, "eos_token_id is"),
        ("generation_config.json", {"eos_token_id": 1.5}, "eos_token_id is 1.5"),
        ("generation_config.json", {"eos_token_id": [1] * 2000}, "a list of at most 1024"),
    ],
)
def test_fields_of_another_type_are_named_with_their_file(
    sentencepiece_folder: Path, name: str, values: dict[str, Any], said: str
) -> None:
    (sentencepiece_folder / name).write_text(json.dumps(values))
    with pytest.raises(UserError, match=f"{name}: .*{said}"):
        Tokenizer.from_dir(sentencepiece_folder)


def test_thousands_of_added_tokens_and_long_runs_of_spaces_take_linear_time(
    sentencepiece_folder: Path,
) -> None:
    decoder = {
        str(i): {"content": f"<extra_{i}>", "lstrip": True, "rstrip": True}
        for i in range(600, 5600)
    }
    path = sentencepiece_folder / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": decoder}))
    splitter = Tokenizer.from_dir(sentencepiece_folder).backend._splitter  # type: ignore[attr-defined]
    text = " " * 100_000 + "<extra_700>" + " " * 100_000 + "<x" * 20_000
    with cpu_seconds(20):  # a pattern with the spaces in it takes minutes, this one milliseconds
        pieces = [(piece, token and token.token_id) for piece, token in splitter.split(text)]
    assert pieces == [("", 700), ("<x" * 20_000, None)]
