"""Files that makers of tokenizers write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sentencepiece


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def write_sentencepiece(
    folder: Path, file: str, texts: Sequence[str], size: int, **options: Any
) -> None:
    """A sentencepiece model with byte tokens, in a folder that is there."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(texts), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "made"),
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        minloglevel=2,
        **options,
    )
    corpus.unlink()
    (folder / "made.vocab").unlink()
    (folder / "made.model").rename(folder / file)
