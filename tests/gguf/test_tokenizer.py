"""Tokenizers from GGUF metadata: the ids that the original files give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest

from predict.errors import UserError
from predict.text.backends.gguf_vocabulary import WAYS, write_tokenizer
from predict.text.tokenizer import Tokenizer
from tests.support import tiny
from tests.support.gguf_blocks import Types
from tests.support.gguf_models import convert
from tests.support.gguf_tokens import add_byte_level, add_sentencepiece, add_tokens
from tests.support.texts import TEXTS

TOKENIZERS = tiny.TOKENIZER.parent
MARKED = ["<|user|> hi<|end|>x", "a<s>b</s>", "  x   y", "<|user|>hi", "Hello   world"]
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
ADDS: dict[str, Callable[[gguf.GGUFWriter], None]] = {
    "byte_level": lambda writer: add_byte_level(writer, TOKENIZERS / "byte_level", "gpt-2"),
    "sentencepiece_legacy": lambda writer: add_sentencepiece(
        writer, TOKENIZERS / "sentencepiece_legacy"
    ),
}


def write(
    tmp_path: Path,
    add: Callable[[gguf.GGUFWriter], None],
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A tiny model with a tokenizer; change: what is written over it."""

    def add_all(writer: gguf.GGUFWriter) -> None:
        add(writer)
        kept = writer.kv_data[0].copy()
        writer.kv_data = [{}]
        change(writer)
        writer.kv_data = [{**kept, **writer.kv_data[0]}]

    directory = tiny.write(tmp_path / "m", {"vocab_size": 512})
    (tmp_path / "gguf").mkdir()
    return convert(directory, tmp_path / "gguf" / "x.gguf", Types.F32, add_all)


@pytest.mark.parametrize("name", ADDS)
def test_ids_and_texts_are_the_original_s(name: str, tmp_path: Path) -> None:
    ours = Tokenizer.from_dir(write(tmp_path, ADDS[name]))
    theirs = Tokenizer.from_dir(TOKENIZERS / name)
    for text in (*TEXTS, *MARKED):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, False) == theirs.decode(ids, False)
    assert ours.vocabulary() == theirs.vocabulary()
    assert ours.special_tokens == theirs.special_tokens
    assert ours.eos_token_ids == theirs.eos_token_ids


@pytest.mark.parametrize("name", ADDS)
def test_a_tokenizer_is_written_as_other_models_have_it(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, ADDS[name])
    folder = tmp_path / "written"
    folder.mkdir()
    write_tokenizer(path, folder)
    shutil.copy(TOKENIZERS / name / "tokenizer_config.json", folder)
    written, original = Tokenizer.from_dir(folder), Tokenizer.from_dir(path)
    for text in (*TEXTS, *MARKED):
        assert written.encode(text) == original.encode(text)


def test_ends_follow_the_metadata(tmp_path: Path) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_add_bos_token(False)
        writer.add_add_eos_token(True)
        writer.add_eot_token_id(341)  # <|end|>

    tokenizer = Tokenizer.from_dir(write(tmp_path, ADDS["byte_level"], change))
    ids = tokenizer.encode("hi")
    assert ids[0] != tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_ids[0]
    assert tokenizer.eos_token_ids == (1, 341)


def test_the_chat_template_is_the_file_s(tmp_path: Path) -> None:
    path = write(tmp_path, ADDS["byte_level"], lambda writer: writer.add_chat_template(TEMPLATE))
    template = Tokenizer.from_dir(path).chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == "<s><|user|>hi<|end|>"
    assert Tokenizer.from_dir(path, "none").chat_template is None


def test_a_tokenizer_json_beside_the_file_is_taken_first(tmp_path: Path) -> None:
    path = write(tmp_path, ADDS["sentencepiece_legacy"])
    assert Tokenizer.from_dir(path).vocab_size == 402
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZERS / "byte_level" / name, path.parent)
    for model in (path, path.parent):
        tokenizer = Tokenizer.from_dir(model)
        assert tokenizer.vocab_size == 342
        assert tokenizer.special_tokens["bos_token"] == "<s>"


def test_tokens_of_spaces_are_found_in_runs_of_spaces(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        tokens = ["<unk>", "<s>", "</s>", "  ", "   ", "\u2581", "a", "b", "[multimodal]"]
        kinds = [2, 3, 3, 4, 4, 1, 1, 1, 4]
        writer.add_tokenizer_model("llama")
        add_tokens(writer, dict(enumerate(tokens)), dict(enumerate(kinds)))
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)

    tokenizer = Tokenizer.from_dir(write(tmp_path, add))
    assert tokenizer.encode("a   b a  b[multimodal]a") == [6, 4, 7, 5, 6, 3, 7, 8, 6]
    assert tokenizer.decode([6, 4, 7, 8]) == "a   b[multimodal]"


def test_a_way_to_cut_text_decides_the_words(tmp_path: Path) -> None:
    folder = tmp_path / "tok"
    folder.mkdir()
    held = json.loads((TOKENIZERS / "byte_level" / "tokenizer.json").read_text())
    number = len(held["model"]["vocab"]) + 2
    held["model"]["vocab"] |= {"12": number, "123": number + 1, "1234": number + 2}
    held["model"]["merges"] += [["1", "2"], ["12", "3"], ["123", "4"]]
    (folder / "tokenizer.json").write_text(json.dumps(held))
    (folder / "tokenizer_config.json").write_text("{}")

    def tokens(way: str) -> list[str]:
        path = write(tmp_path / way, lambda writer: add_byte_level(writer, folder, way))
        tokenizer = Tokenizer.from_dir(path)
        return [tokenizer.decode([i]) for i in tokenizer.encode("12345")]

    assert tokens("gpt-2") == ["1234", "5"]
    assert tokens("llama-bpe") == ["123", "4", "5"]
    assert tokens("qwen2") == ["1", "2", "3", "4", "5"]


def no_scores(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "a"])
    writer.add_token_scores([0.0])


REFUSED: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "another kind": (
        lambda writer: writer.add_tokenizer_model("rwkv"),
        "tokenizer of the kind 'rwkv', .*known: gpt2, llama.*tokenizer.json of the original",
    ),
    "another way": (
        lambda writer: writer.add_tokenizer_pre("poro-chat"),
        "in the way 'poro-chat', .*known: default, .*qwen2",
    ),
    "kinds of fewer tokens": (
        lambda writer: writer.add_token_types([1, 1]),
        "342 tokens, and 2 numbers in tokenizer.ggml.token_type",
    ),
    "kinds that are none": (
        lambda writer: writer.add_token_types([9] * 342),
        "one of 1 to 6 for each",
    ),
    "merges of unknown tokens": (
        lambda writer: writer.add_token_merges(["no such"]),
        "cannot read the tokenizer",
    ),
    "merges that are numbers": (
        lambda writer: writer.add_array("tokenizer.ggml.merges", [1, 2]),
        "allowed: a list of texts",
    ),
    "a flag that is a number": (
        lambda writer: writer.add_uint32("tokenizer.ggml.add_bos_token", 1),
        "add_bos_token is 1 .allowed: true, false",
    ),
    "scores of fewer tokens": (no_scores, "2 tokens, and 1 numbers in tokenizer.ggml.scores"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_vocabularies_that_are_not_known_or_whole_are_refused(name: str, tmp_path: Path) -> None:
    change, said = REFUSED[name]
    add = change if change is no_scores else ADDS["byte_level"]
    path = write(tmp_path, add, change)
    with pytest.raises(UserError, match=said):
        Tokenizer.from_dir(path)


def test_a_file_without_tokens_has_no_tokenizer(tmp_path: Path) -> None:
    path = convert(tiny.write(tmp_path / "m"), tmp_path / "x.gguf")
    assert not Tokenizer.exists(path)
    assert Tokenizer.exists(write(tmp_path, ADDS["byte_level"]))


def test_every_way_is_one_that_the_library_takes(tmp_path: Path) -> None:
    for way in WAYS:
        path = write(
            tmp_path / way,
            lambda writer, way=way: add_byte_level(writer, TOKENIZERS / "byte_level", way),  # type: ignore[misc]
        )
        tokenizer = Tokenizer.from_dir(path)
        for text in TEXTS:
            assert tokenizer.decode(tokenizer.encode(text)) == text
