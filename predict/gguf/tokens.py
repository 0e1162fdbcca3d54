"""tokenizer_config.json of a GGUF file: special tokens, ends of a text, and the chat template."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from predict.errors import UserError
from predict.gguf.metadata import GgufMetadata
from predict.gguf.reader import GgufFile

# What sentencepiece and llama.cpp call kinds of tokens.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
KINDS = (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE)
ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"
SPACE = "\u2581"  # sentencepiece's
# Ways to cut text of models that put their first token in front where the file does not say.
BOS_BY_DEFAULT = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "tekken")


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a file by id, and what it says of each."""

    model: str  # of tokenizer.ggml.model
    tokens: list[str]
    kinds: list[int]  # of KINDS
    data: GgufMetadata


def has_tokenizer(file: GgufFile) -> bool:
    """Whether the file holds a vocabulary; those for measurements may have none."""
    return "tokenizer.ggml.tokens" in file.metadata


def vocabulary_of(file: GgufFile) -> Vocabulary:
    """The file's vocabulary. Raises UserError where it has none, or one of another kind."""
    data = GgufMetadata(file)
    model = data.text("tokenizer.ggml.model", "none")
    known = (BYTE_LEVEL, SENTENCEPIECE)
    if model not in known:
        raise UserError(
            f"{file.path} has a tokenizer of the kind {model[:40]!r}, which is not supported "
            f"(known: {', '.join(known)}); copy the tokenizer.json of the original model beside "
            "the file"
        )
    tokens = data.texts("tokenizer.ggml.tokens")
    kinds = [NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in data:
        kinds = data.numbers("tokenizer.ggml.token_type")
    if len(kinds) != len(tokens) or not set(kinds) <= set(KINDS):
        raise UserError(
            f"{file.path} has {len(tokens)} tokens, and {len(kinds)} numbers in "
            f"tokenizer.ggml.token_type (allowed: one of {KINDS[0]} to {KINDS[-1]} for each); "
            "convert the model again"
        )
    return Vocabulary(model, tokens, kinds, data)


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """What tokenizer_config.json says. Raises UserError naming the key that is wrong."""
    data = GgufMetadata(file)
    values: dict[str, Any] = {"name_or_path": data.text("general.name", "")}
    template = data.text("tokenizer.chat_template", "")
    if template:
        values["chat_template"] = template
    if not has_tokenizer(file):
        return values
    vocabulary = vocabulary_of(file)
    tokens, is_byte_level = vocabulary.tokens, vocabulary.model == BYTE_LEVEL
    for role, key in ROLES.items():
        token_id = data.optional(f"tokenizer.ggml.{key}")
        if token_id is not None and 0 <= token_id < len(tokens):
            values[role] = tokens[token_id]
    way = data.text("tokenizer.ggml.pre", "")
    first = way in BOS_BY_DEFAULT if is_byte_level else True
    values["add_bos_token"] = data.flag("tokenizer.ggml.add_bos_token", first)
    values["add_eos_token"] = data.flag("tokenizer.ggml.add_eos_token", False)
    values["added_tokens_decoder"] = {
        str(token_id): {"content": tokens[token_id], "special": kind == CONTROL}
        for token_id, kind in enumerate(vocabulary.kinds)
        if kind in (CONTROL, USER_DEFINED)
        and (is_byte_level or tokens[token_id].strip(f" {SPACE}"))
    }
    return values


def scores_of(vocabulary: Vocabulary) -> list[float]:
    """The score of each token; UserError where numbers are missing or are none."""
    scores = vocabulary.data.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary.tokens) or not all(map(math.isfinite, scores)):
        raise UserError(
            f"{vocabulary.data.file.path} has {len(vocabulary.tokens)} tokens, and {len(scores)} "
            "numbers in tokenizer.ggml.scores (allowed: a finite one for each); convert the model "
            "again"
        )
    return [float(score) for score in scores]
