"""Tokenizers of vocab.json and merges.txt against transformers' (tests/data/make_merges.py)."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from predict.errors import UserError
from predict.text.detokenizer import Detokenizer
from predict.text.tokenizer import Tokenizer

DATA = Path(__file__).parents[1] / "data"
FOLDERS = DATA / "merges"
GOLDEN: dict[str, Any] = json.loads((DATA / "merges.json").read_text(encoding="utf-8"))
FAMILIES = GOLDEN["families"]
CASES = [
    pytest.param(name, text, case, id=f"{name}-{number}")
    for name, family in FAMILIES.items()
    for number, (text, case) in enumerate(zip(GOLDEN["texts"], family["cases"], strict=True))
]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_dir(FOLDERS / name)


@pytest.mark.parametrize(("name", "text", "case"), CASES)
def test_ids_and_texts_equal_transformers(name: str, text: str, case: dict[str, Any]) -> None:
    tokenizer = tokenizer_of(name)
    ids = case["ids"]
    assert tokenizer.encode(text, add_special_tokens=False) == ids
    assert tokenizer.encode(text) == case["with_ends"]
    assert tokenizer.decode(ids) == case["decoded"]
    assert tokenizer.decode(ids, skip_special_tokens=False) == case["decoded_all"]


@pytest.mark.parametrize("name", FAMILIES)
def test_sizes_and_ends_equal_transformers(name: str) -> None:
    tokenizer, family = tokenizer_of(name), FAMILIES[name]
    assert tokenizer.vocab_size == family["size"]
    assert tokenizer.eos_token_ids == (family["eos"],)
    assert tokenizer.bos_token_id == family["bos"]


def test_each_way_to_cut_gives_other_ids() -> None:
    """The texts tell the ways apart, so that the golden would see one taken for another."""
    names = ("gpt2", "gpt2_prefixed", "qwen2", "gpt_neox", "cohere", "starcoder2", "bloom")
    seen = {json.dumps([case["ids"] for case in FAMILIES[name]["cases"][1:13]]) for name in names}
    assert len(seen) == len(names)


@pytest.mark.parametrize("name", FAMILIES)
def test_pieces_join_to_the_text_of_the_whole(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for text in GOLDEN["texts"]:
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer, True).stream(ids[:3])
        pieces = [*(stream.append([token_id]) for token_id in ids[3:]), stream.finish()]
        assert "".join(pieces) == tokenizer.decode_continuation(ids[:3], ids[3:], True)


def test_a_tokenizer_json_is_taken_first(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "gpt2", tmp_path / "model")
    assert Tokenizer.exists(folder)
    shutil.copy(DATA / "tokenizers" / "byte_level" / "tokenizer.json", folder)
    other = Tokenizer.from_dir(DATA / "tokenizers" / "byte_level")
    assert Tokenizer.from_dir(folder).vocabulary() == other.vocabulary()


def test_special_tokens_may_be_read_as_text(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "gpt2", tmp_path / "model")
    change(folder, "tokenizer_config.json", split_special_tokens=True)
    tokenizer = Tokenizer.from_dir(folder)
    ids = tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    assert len(ids) > 1
    assert tokenizer.decode(ids) == "<|endoftext|>"


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | values))


@pytest.mark.parametrize(
    ("name", "file", "values", "said"),
    [
        ("gpt2", "tokenizer_config.json", {"add_prefix_space": "no"}, "add_prefix_space is a text"),
        ("gpt2", "tokenizer_config.json", {"bos_token": 3}, "bos_token is a number"),
        ("gpt2", "config.json", {"model_type": "phi3"}, "'phi3' of config.json .known: Bloom"),
        ("gpt2", "config.json", {"model_type": "mistral"}, "copy a tokenizer.json"),
        ("gpt_neox", "tokenizer_config.json", {"tokenizer_class": "Other"}, None),
        ("qwen2", "tokenizer_config.json", {"additional_special_tokens": 7}, "is a number"),
        ("qwen2_older", "added_tokens.json", {"<|x|>": 9000}, "says that its id is 9000 .allowed"),
        ("qwen2_older", "added_tokens.json", {"<|x|>": "many"}, "the token id is 'many'"),
        ("gpt2", "vocab.json", {"new": 9000}, "and none with the id 6"),
        ("gpt2", "vocab.json", {"new": -1}, "'new': the token id is '-1'"),
        ("gpt2", "vocab.json", {"new": 0.5}, "'new': the token id is '0.5'"),
    ],
)
def test_what_contradicts_itself_is_named(
    tmp_path: Path, name: str, file: str, values: dict[str, Any], said: str | None
) -> None:
    folder = shutil.copytree(FOLDERS / name, tmp_path / "model")
    change(folder, file, **values)
    if said is None:  # the family tells where the class does not
        assert Tokenizer.from_dir(folder).encode("hello") == tokenizer_of(name).encode("hello")
        return
    with pytest.raises(UserError, match=said):
        Tokenizer.from_dir(folder)


MERGES = (FOLDERS / "gpt2" / "merges.txt").read_text(encoding="utf-8").split("\n")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([*MERGES[:5], "lonely"], "line 6 is 'lonely' .allowed: two tokens"),
        ([*MERGES[:5], "a b c"], "line 6 is 'a b c'"),
        ([*MERGES[:5], " b"], "line 6 is ' b'"),
        ([*MERGES[:5], "zz yy"], "cannot read the tokenizer .*copy both again"),
        (["version https://git-lfs.github.com/spec/v1"], "cannot read the tokenizer .*copy both"),
    ],
)
def test_a_damaged_file_of_merges_is_named(tmp_path: Path, lines: list[str], said: str) -> None:
    folder = shutil.copytree(FOLDERS / "gpt2", tmp_path / "model")
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(UserError, match=said):
        Tokenizer.from_dir(folder)


def test_a_vocabulary_needs_its_merges(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "gpt2", tmp_path / "model")
    (folder / "merges.txt").unlink()
    with pytest.raises(UserError, match=r"merges.txt is missing beside vocab.json"):
        Tokenizer.from_dir(folder)
    with (folder / "merges.txt").open("wb") as file:
        file.truncate(1 << 28)
    with pytest.raises(UserError, match="268435456 bytes; a file of merges may have 134217728"):
        Tokenizer.from_dir(folder)


def test_ends_of_lines_may_be_those_of_windows(tmp_path: Path) -> None:
    folder = shutil.copytree(FOLDERS / "gpt2", tmp_path / "model")
    data = (folder / "merges.txt").read_bytes()
    (folder / "merges.txt").write_bytes(data.replace(b"\n", b"\r\n"))
    assert Tokenizer.from_dir(folder).encode("hello") == tokenizer_of("gpt2").encode("hello")
