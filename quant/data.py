"""Calibration and evaluation texts as sequences of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from predict.cli.data import DataItem, read_data_file
from predict.errors import UserError
from predict.system.files import read_text
from predict.text.conversation import conversation_messages
from predict.text.tokenizer import Tokenizer

TokenArray = npt.NDArray[np.int32]

# What PaddleNLP looks for in a dataset's folder.
DATASET_FILES = ("quant.json", "quant/*.json", "train.json", "train/*.json")
TEXT_SUFFIXES = (".txt", ".text", ".md", ".py")


def find_data_file(path: str | Path, flag: str = "--data_file") -> list[Path]:
    """The files of a data file or of a dataset's folder; raises UserError where there are none."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{flag} {path} does not exist")
    for pattern in DATASET_FILES:
        if found := sorted(path.glob(pattern)):
            return found
    raise UserError(
        f"{flag} {path} is a folder without any of {', '.join(DATASET_FILES)}; give a file"
    )


def read_sequences(
    path: str | Path, tokenizer: Tokenizer, max_tokens: int, max_sequences: int | None = None
) -> list[TokenArray]:
    """Token ids of a text file's windows, or of the lines of {"src", "tgt"} files.

    max_tokens: of one sequence. A text is cut into windows of that length, each after the
    begin-of-text token where the model has one; with max_sequences, windows spread evenly over the
    text. A line's src and tgt make one sequence, cut at the end. Raises UserError where nothing is
    left.
    """
    sequences: list[TokenArray] = []
    for file in find_data_file(path):
        if file.suffix in TEXT_SUFFIXES:
            text = read_text(file)
            if not text.strip():
                raise UserError(f"--data_file {file} is blank; give a file with text in it")
            sequences += text_windows(text, tokenizer, max_tokens)
            spread = True
        else:
            sequences += [_line(item, tokenizer)[:max_tokens] for item in read_data_file(file)]
            spread = False
    sequences = [ids for ids in sequences if len(ids)]
    if not sequences:
        raise UserError(f"--data_file {path} holds no text")
    if max_sequences is not None and len(sequences) > max_sequences:
        if spread:
            chosen = np.linspace(0, len(sequences) - 1, max_sequences).round().astype(int)
            return [sequences[index] for index in chosen]
        return sequences[:max_sequences]
    return sequences


def text_windows(text: str, tokenizer: Tokenizer, max_tokens: int) -> list[TokenArray]:
    """The text in windows of max_tokens, begin-of-text tokens included; the last may be short."""
    ids = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    start = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = max_tokens - len(start)
    if size < 1:
        raise UserError(f"a window of {max_tokens} tokens has no room for text")
    prefix = np.array(start, np.int32)
    return [np.concatenate([prefix, ids[at : at + size]]) for at in range(0, len(ids), size)]


def _line(item: DataItem, tokenizer: Tokenizer) -> TokenArray:
    """Token ids of one line: src and tgt, with the chat template where the tokenizer has one."""
    tgt = item.tgt if isinstance(item.tgt, str) else " ".join(map(str, item.tgt))
    if tokenizer.chat_template is not None:
        prompt = tokenizer.chat_template.render(conversation_messages(item.src, ""))
        return np.array(tokenizer.encode(prompt + tgt, add_special_tokens=False), np.int32)
    if isinstance(item.src, str):
        text = item.src + tgt
    else:
        messages = conversation_messages(item.src, "")
        text = "\n".join(str(message["content"]) for message in messages) + tgt
    return np.array(tokenizer.encode(text), np.int32)


def digest(sequences: Sequence[TokenArray]) -> str:
    """A hash of the sequences, to recognise them."""
    state = hashlib.sha256()
    for ids in sequences:
        state.update(len(ids).to_bytes(8, "little"))
        state.update(ids.tobytes())
    return state.hexdigest()
