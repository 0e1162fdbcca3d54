"""Tokenizers from a GGUF file's metadata: byte-level BPE, or a rebuilt sentencepiece model.

Sentencepiece vocabularies have pieces, scores and kinds, which are all that its library needs.
Byte-level ones have tokens, merges, and the name of the way to cut text before it is merged, a row
of WAYS. Source: llama.cpp's src/llama-vocab.cpp.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from predict.errors import UserError, quoted
from predict.gguf.opened import open_gguf
from predict.gguf.tokens import (
    BYTE,
    CONTROL,
    NORMAL,
    SENTENCEPIECE,
    SPACE,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    scores_of,
    vocabulary_of,
)
from predict.text.backends.added import MAX_TOKEN_ID
from predict.text.backends.base import Backend, explicit_ends
from predict.text.backends.fast import FastBackend, byte_level
from predict.text.backends.sentencepiece_model import FamilyDialect, SentencePieceBackend
from predict.text.backends.tiktoken_file import WORDS

HINT = "its metadata may be damaged: download the file again, or convert the model again"
NUM_BYTES = 256
# Regular expressions that cut a text into words.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
ONE_DIGIT, THREE_DIGITS = WORDS.format(digits=""), WORDS.format(digits="{1,3}")
# Of a mark ahead of a line's end, the end is a word of its own.
SEED = ONE_DIGIT.replace(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}\r\n]+")
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_HEAD, _REST = r"[^\r\n\p{L}\p{N}]?", r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|\p{{N}}{_REST}"
GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_SHORT}|{_HEAD}{_UPPER}+{_LOWER}*{_SHORT}"
    rf"|\p{{N}}{{1,3}}{_REST}"
)
DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Way:
    """How text is prepared for the merges."""

    cuts: tuple[str, ...]  # as whole_words and composes, of predict.text.backends.fast.byte_level
    whole_words: bool = False
    composes: bool = False


_LLAMA3 = Way((THREE_DIGITS,), whole_words=True)
_QWEN2 = Way((ONE_DIGIT,), composes=True)
_STARCODER = Way((r"\p{N}", GPT2))
_GPT4O = Way((GPT4O,))
# By tokenizer.ggml.pre.
WAYS: Mapping[str, Way] = {
    "default": Way((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt", "gigachat", "exaone4"), Way((GPT2,))),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), Way((THREE_DIGITS,))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan", "kormo"), _QWEN2
    ),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        _STARCODER,
    ),
    "tekken": Way((TEKKEN,), whole_words=True),
    **dict.fromkeys(("gpt-4o", "llama4", "minimax-m2"), _GPT4O),
    "falcon": Way((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]")),
    "deepseek-coder": Way((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"), Way((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK3))
    ),
    "seed-coder": Way((SEED,)),
}


def gguf_backend(
    path: Path, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> tuple[Backend, Mapping[str, str]]:
    """The tokenizer of a GGUF file, and its special tokens by role.

    config: as predict.gguf.tokens makes it. Raises UserError for an unknown kind, an unknown way to
    cut text, and metadata that contradict each other.
    """
    vocabulary = vocabulary_of(open_gguf(path))
    if len(vocabulary.tokens) > MAX_TOKEN_ID:
        raise UserError(
            f"{path} has {len(vocabulary.tokens)} tokens (allowed: {MAX_TOKEN_ID} at most)"
        )
    if vocabulary.model == SENTENCEPIECE:
        model = SentencePieceBackend(
            path, config, special_tokens, FamilyDialect(), lambda: sentencepiece_model(vocabulary)
        )
        return model, model.special_tokens
    way = _way(vocabulary)
    backend = FastBackend(path, lambda: _byte_level(vocabulary, way), HINT)
    backend.put_around(explicit_ends(config, special_tokens, backend.token_to_id))
    return backend, special_tokens


def write_tokenizer(path: Path, folder: Path) -> None:
    """Writes the tokenizer of a GGUF file into a folder as tokenizer.model or tokenizer.json."""
    vocabulary = vocabulary_of(open_gguf(path))
    if vocabulary.model == SENTENCEPIECE:
        (folder / "tokenizer.model").write_bytes(sentencepiece_model(vocabulary))
    else:
        _byte_level(vocabulary, _way(vocabulary)).save(str(folder / "tokenizer.json"))


def _way(vocabulary: Vocabulary) -> Way:
    data = vocabulary.data
    name = data.text("tokenizer.ggml.pre", "default")
    if name not in WAYS:
        raise UserError(
            f"{data.file.path} cuts text in the way {quoted(name)}, which is not supported (known: "
            f"{', '.join(WAYS)}); copy the tokenizer.json of the original model beside the file"
        )
    return WAYS[name]


def _byte_level(vocabulary: Vocabulary, way: Way) -> Any:
    """A tokenizers.Tokenizer of tokens spelled in GPT-2's letters for bytes."""
    from tokenizers import AddedToken

    tokens = _unique(vocabulary.tokens)
    # Byte-level tokens have no space in them.
    cuts = (each.partition(" ") for each in vocabulary.data.texts("tokenizer.ggml.merges"))
    merges = [(left, right) for left, _, right in cuts]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = byte_level(
        ids, merges, way.cuts, composes=way.composes, whole_words=way.whole_words
    )
    for kind, add in (
        (CONTROL, tokenizer.add_special_tokens),
        (USER_DEFINED, tokenizer.add_tokens),
    ):
        found = [token for token, k in zip(tokens, vocabulary.kinds, strict=True) if k == kind]
        add([AddedToken(token, normalized=False, special=kind == CONTROL) for token in found])
    return tokenizer


def _unique(tokens: Sequence[str]) -> list[str]:
    """The tokens; empty ones, and all but the first of equal ones, are renamed."""
    seen: set[str] = {""}
    names = []
    for token_id, token in enumerate(tokens):
        if token in seen:
            token = f"[unused {token_id}]"
        seen.add(token)
        names.append(token)
    return names


def sentencepiece_model(vocabulary: Vocabulary) -> bytes:
    """The model as its library reads it: a protobuf message ModelProto."""
    data = vocabulary.data
    kinds = _kinds(vocabulary)
    pieces = _unique(vocabulary.tokens)
    message = bytearray()
    for piece, kind, score in zip(pieces, kinds, scores_of(vocabulary), strict=True):
        # Converters write the spaces of added tokens as they are.
        text = piece.replace(" ", SPACE) if kind in (NORMAL, USER_DEFINED) else piece
        score_field = _varint(2 << 3 | 5) + struct.pack("<f", score)
        message += _nested(1, _nested(1, text.encode()) + score_field + _whole(3, kind))
    has_bytes = BYTE in kinds
    message += _nested(2, _whole(3, 2) + _whole(4, len(pieces)) + _whole(35, has_bytes))  # BPE
    prefix = data.flag("tokenizer.ggml.add_space_prefix", True)
    squeezes = data.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = _nested(1, b"identity") + _whole(3, prefix) + _whole(4, squeezes) + _whole(5, True)
    return bytes(message + _nested(3, normalizer))


def _kinds(vocabulary: Vocabulary) -> list[int]:
    """The kinds as the library takes them: one unknown token, and all bytes or none."""
    kinds = [
        UNUSED if not token else kind
        for token, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else None
    if unknown is None:
        unknown = vocabulary.data.whole("tokenizer.ggml.unknown_token_id", 0)
    all_bytes = kinds.count(BYTE) == NUM_BYTES
    known = [
        CONTROL if kind == UNKNOWN else NORMAL if kind == BYTE and not all_bytes else kind
        for kind in kinds
    ]
    if not 0 <= unknown < len(known):
        raise UserError(
            f"{vocabulary.data.file.path}: tokenizer.ggml.unknown_token_id is {unknown}, and there "
            f"are {len(known)} tokens; convert the model again"
        )
    known[unknown] = UNKNOWN
    return known


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def _whole(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _nested(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data
