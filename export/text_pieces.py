"""A sentencepiece model as a text file: its pieces with scores become merges with ranks.

Sentencepiece joins the neighbours whose piece has the highest score, the leftmost of equal ones
(Kudo and Richardson, 2018). So every cut of a piece into two is a merge, ranked by the piece's
score. It puts a character into byte tokens after its merges, and no merge takes one.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from export import text_layout as layout
from export.text_layout import Step, TextFile, refuse
from predict.text.backends.sentencepiece_model import (
    SENTENCEPIECE_SPACE,
    FamilyDialect,
    SentencePieceBackend,
)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE_PIECE = 1, 2, 3, 4, 6
BPE = 2  # of model_type
WRITTEN_FOR_UNKNOWN = " \u2047 ".encode()


@dataclass(frozen=True)
class _Model:
    """The fields of sentencepiece's ModelProto that a text file takes."""

    pieces: list[tuple[str, float, int]]  # text, score, kind
    byte_fallback: bool
    adds_prefix: bool
    for_unknown: bytes


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message that its library has accepted: numbers and bytes."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = number()
        kind = key & 7
        if kind == 0:
            yield key >> 3, number()
            continue
        size = number() if kind == 2 else 4 if kind == 5 else 8
        yield key >> 3, data[at : at + size]
        at += size


def _read(data: bytes, path: Path) -> _Model:
    """The model; UserError where it is of another kind, or changes texts before it cuts them."""
    parts: dict[int, list[bytes]] = {}
    for name, value in _fields(data):
        parts.setdefault(name, []).append(value)
    trainer = dict(_fields(b"".join(parts.get(2, []))))
    normalizer = dict(_fields(b"".join(parts.get(3, []))))
    if trainer.get(3, 1) != BPE:
        refuse(path, f"a sentencepiece model of type {trainer.get(3, 1)} (1: Unigram)")
    if trainer.get(24) or normalizer.get(2) or normalizer.get(4, 1) or not normalizer.get(5, 1):
        name = normalizer.get(1, b"").decode(errors="replace")
        refuse(path, f"a sentencepiece model's normalizer {name!r}, or what it does with spaces,")
    pieces = []
    for each in parts[1]:
        held = dict(_fields(each))
        score = struct.unpack("<f", held.get(2, bytes(4)))[0]
        pieces.append((held[1].decode(), score, held.get(3, NORMAL)))
        if pieces[-1][2] not in (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE_PIECE):
            refuse(path, f"a sentencepiece model's unused piece {pieces[-1][0]!r}")
    for_unknown = trainer.get(44, WRITTEN_FOR_UNKNOWN)
    return _Model(pieces, bool(trainer.get(35, 0)), bool(normalizer.get(3, 1)), for_unknown)


def pieces_file(backend: SentencePieceBackend, path: Path) -> TextFile:
    """What the text file of a sentencepiece model holds. Raises UserError naming what it cannot."""
    held = backend.described()
    if dataclasses.replace(held.dialect, special_pieces={}) != FamilyDialect():
        refuse(path, "what this family's code does with its sentencepiece model")
    model = _read(held.proto, path)
    known = {text: i for i, (text, _, kind) in enumerate(model.pieces) if kind == NORMAL}
    single = {text for text, _, kind in model.pieces if kind in (NORMAL, USER_DEFINED)}
    for text in known:
        if lacks := next((letter for letter in text if letter not in single), None):
            refuse(path, f"the piece {text!r}, whose {lacks!r} is no piece,")
    words = {text.encode(): i for text, i in known.items() if len(text) == 1}
    texts, added = {}, {}
    for i, (text, _, kind) in enumerate(model.pieces):
        texts[i] = _text_of(text, kind, model)
        if kind == BYTE_PIECE:
            words[text.encode()] = i
        elif kind == USER_DEFINED:
            added[True, text.encode()] = i, layout.SWITCHES["normalized"]
    for token in held.added:
        switches = ("special", "lstrip", "rstrip")
        flags = sum(layout.SWITCHES[name] for name in switches if getattr(token, name))
        added[False, token.content.encode()] = token.token_id, flags
        texts[token.token_id] = layout.TEXT | layout.SPECIAL * token.special, token.content.encode()
    scheme = layout.SCHEMES.index("always" if held.legacy else "first")
    prefix = Step(layout.PREPEND, scheme, a=SENTENCEPIECE_SPACE)
    return TextFile(
        layout.FUSE_UNKNOWN | layout.EACH_BYTE | layout.BYTE_FALLBACK * model.byte_fallback,
        next(i for i, (_, _, kind) in enumerate(model.pieces) if kind == UNKNOWN),
        (held.ends.first, held.ends.last),
        [prefix] * model.adds_prefix + [Step(layout.REPLACE, a=" ", b=SENTENCEPIECE_SPACE)],
        added,
        texts,
        words,
        _merges(known, model),
        strip=int(model.adds_prefix),
    )


def _text_of(text: str, kind: int, model: _Model) -> tuple[int, bytes]:
    if kind == BYTE_PIECE:
        return layout.BYTE, bytes([int(text[1:-1], 16)])  # <0x0A>
    if kind in (CONTROL, UNKNOWN):
        return layout.TEXT, model.for_unknown if kind == UNKNOWN else b""
    return layout.TEXT, text.replace(SENTENCEPIECE_SPACE, " ").encode()


def _merges(known: Mapping[str, int], model: _Model) -> dict[tuple[int, int], tuple[int, int]]:
    scores = sorted({model.pieces[i][1] for i in known.values()}, reverse=True)
    ranks = {score: rank for rank, score in enumerate(scores)}
    merges = {}
    for text, i in known.items():
        merge = ranks[model.pieces[i][1]], i
        for cut in range(1, len(text)):
            left, right = known.get(text[:cut]), known.get(text[cut:])
            if left is not None and right is not None:
                merges[left, right] = merge
    return merges
