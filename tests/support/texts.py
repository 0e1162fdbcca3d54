"""Prompts and texts that tests share."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from pathlib import Path

from predict.text.tokenizer import Tokenizer

PROMPTS = ["def add(a, b):", "class Stack:\n", 'text = "naïve café — 日本語"\n']


REPLACEMENT = "\ufffd"
TEXTS = [
    "def binary_search(items, target):\n    low, high = 0, len(items)\n",
    "  two leading spaces, trailing ones  \n\n\ttab",
    "naïve café — 中文字符, emoji 👩‍👩‍👧 🇫🇷, ελληνικά, עברית",
    "\n",
    " ",
]


def read_back(name: str, content: bytes) -> Tokenizer:
    """The tokenizer of a checkpoint folder that holds one file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        return Tokenizer.from_dir(folder)


@cache
def byte_level() -> Tokenizer:
    """Bytes, a few merges and one special token, as GPT-2, Llama 3 and Qwen have."""
    import tokenizers

    fast = tokenizers.Tokenizer(tokenizers.models.BPE())
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(TEXTS * 3, trainer)
    return read_back("tokenizer.json", fast.to_str().encode())


@cache
def byte_fallback(num_ahead: int = 0) -> Tokenizer:
    """Pieces with a space mark and byte tokens, as Llama 1 and 2 have in tokenizer.json.

    num_ahead: other pieces ahead of the byte tokens.
    """
    import tokenizers

    pieces = ["<unk>", "<s>", "</s>", *(f"word{i}" for i in range(num_ahead))]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", "▁▁", "▁the", "▁a", "a", "b", "ing", ".", "中", "é"]
    fast = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            {piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>"
        )
    )
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return read_back("tokenizer.json", fast.to_str().encode())


@cache
def sentencepiece_model() -> Tokenizer:
    """A sentencepiece model with byte tokens, as Llama 1, 2 and Mistral have."""
    import sentencepiece

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:3] * 5),
        model_writer=written,
        vocab_size=330,
        byte_fallback=True,
        character_coverage=0.98,
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return read_back("tokenizer.model", written.getvalue())


TOKENIZERS = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "sentencepiece": sentencepiece_model,
}
