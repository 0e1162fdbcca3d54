"""export/export_text.py: what it writes, and what it refuses by name; no library is built."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from export import text_layout as layout
from export.export_text import _byte_of, export_text, main, text_file
from predict.errors import UserError
from predict.text import tokenizer as ours
from tests.support import text_tokenizers as made
from tests.support.paths import DEMO, ROOT

DATA = ROOT / "tests" / "data"


def unigram() -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(made.SCRIPTS * 3),
        model_writer=written,
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return written.getvalue()


def test_a_sentencepiece_model_of_another_kind_is_named_at_export(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(unigram())
    with pytest.raises(UserError, match=r"type 1 \(1: Unigram\) is not among the steps"):
        export_text(tmp_path, tmp_path / "text.bin")


def settings(**parts: Any) -> Tokenizer:
    """GPT-2's steps with other parts."""
    tokens = made.gpt2()
    for part, value in parts.items():
        setattr(tokens, part, value)
    return tokens


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (lambda: Tokenizer(models.WordPiece({"a": 0}, unk_token="a")), "WordPiece"),
        (lambda: Tokenizer(models.Unigram([("a", 0.0)], 0, False)), "Unigram"),
        (lambda: settings(normalizer=normalizers.NFKC()), "normalizer NFKC"),
        (lambda: settings(normalizer=normalizers.Lowercase()), "normalizer Lowercase"),
        (lambda: settings(pre_tokenizer=pre_tokenizers.Whitespace()), "pre_tokenizer Whitespace"),
        (lambda: settings(decoder=decoders.WordPiece()), "decoder WordPiece"),
        (lambda: settings(decoder=decoders.Fuse()), "decoder that is ByteLevel, or is not"),
        (
            lambda: settings(post_processor=processors.BertProcessing(("a", 0), ("b", 1))),
            "post_processor BertProcessing",
        ),
        (lambda: made.pieces_tokenizer(dropout=0.5), "dropout 0.5"),
        (lambda: made.pieces_tokenizer(end_of_word_suffix="x"), "end_of_word_suffix 'x'"),
    ],
)
def test_a_step_outside_the_list_is_named_at_export(
    tokens: Callable[[], Tokenizer], message: str
) -> None:
    with pytest.raises(UserError, match=f"made: .*{message}.* is not among the steps"):
        text_file(made.python_of(tokens()), Path("made"))


def test_an_id_that_no_reader_takes_is_refused_at_export(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "MAX_IDS", 100)
    with pytest.raises(UserError, match=r"made: the id of a token: \d+, above 99, is not among"):
        text_file(made.python_of(made.gpt2()), Path("made"))


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False)]
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": normalizers.Prepend("é" * 513)}, "a step's text .*: 1026, above 1024"),
        ({"normalizer": normalizers.Replace("a", "b" * 1025)}, "a step writes .*: 1025, above"),
        (
            {"normalizer": normalizers.Sequence([normalizers.Prepend("a")] * 65)},
            "number of steps: 66, above 64",
        ),
        ({"pre_tokenizer": split("a{2}" * 16385)}, "a step's text .*: 65540, above 65536"),
    ],
)
def test_a_step_that_no_reader_takes_is_refused_at_export(
    parts: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        text_file(made.python_of(settings(**parts)), Path("made"))


def test_byte_tokens_have_digits_of_ascii() -> None:
    for token, byte in {
        "<0x1a>": 0x1A,
        "<0xFF>": 255,
        "<0x١٢>": None,
        "<0x+1>": 1,
        "<0x1>": None,
    }.items():
        assert _byte_of(token) == byte


def test_the_command_writes_a_file_or_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "text.bin"
    assert main([str(DEMO), str(target)]) == 0
    assert target.read_bytes() == text_file(ours.Tokenizer.from_dir(DEMO), DEMO)
    assert main([str(DEMO)]) == 2
    assert "two names are needed" in capsys.readouterr().err
    assert main([str(DATA / "families" / "chatglm3_6b"), str(target)]) == 2
    assert "this family's code does with its sentencepiece model" in capsys.readouterr().err
