"""JSON in a text that comes in pieces: where a value ends, and objects that call a tool."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from predict.errors import UserError
from predict.system.files import parse_json
from predict.text.markup import Emit, Output, Reader, Steps

_IN_STRING = re.compile(r'[^"\\]*')
_IN_VALUE = re.compile(r"[\s\w+\-.,:]*")  # of an object or a list, outside of texts
_IN_SCALAR = re.compile(r"[\w+\-.]*")
_CLOSERS = {"{": "}", "[": "]"}
NO_ARGUMENTS = "{}"


class Outcome(Enum):
    """How the reading of a call ended."""

    NONE = "no call"  # nothing was emitted
    WHOLE = "whole"
    CUT = "cut"  # the call was begun, and its text breaks off


@dataclass(frozen=True)
class CallKeys:
    """The keys of an object that calls a tool."""

    arguments: tuple[str, ...] = ("arguments", "parameters")
    # Other keys that it may have; None: any.
    others: Collection[str] | None = None
    # Names that it may call; None: any.
    names: Collection[str] | None = None


def value(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads a JSON value and emits its text; False, with no more read, where it breaks off.

    Finds its end only, without a check: a comma too many passes.
    """
    closers: list[str] = []
    while True:
        character = yield from reader.peek()
        if character == '"':
            if not (yield from _string(reader, emit)):
                return False
        elif character in _CLOSERS:
            closers.append(_CLOSERS[character])
            emit(reader.take(1))
        elif closers and character == closers[-1]:
            closers.pop()
            emit(reader.take(1))
        elif closers:
            piece = reader.matched(_IN_VALUE)
            if not piece:
                return False
            emit(piece)
        else:
            return (yield from _scalar(reader, emit))
        if not closers:
            return True


def _string(reader: Reader, emit: Emit) -> Steps[bool]:
    emit(reader.take(1))
    while character := (yield from reader.peek()):
        if character == '"':
            emit(reader.take(1))
            return True
        if character == "\\":
            emit(reader.take(1))
            if (yield from reader.peek()):
                emit(reader.take(1))
        else:
            emit(reader.matched(_IN_STRING))
    return False


def _scalar(reader: Reader, emit: Emit) -> Steps[bool]:
    sizes: list[int] = []

    def counted(piece: str) -> None:
        sizes.append(len(piece))
        emit(piece)

    yield from reader.run(_IN_SCALAR, counted)
    return bool(sizes)


def _text(reader: Reader) -> Steps[str | None]:
    """A JSON text's value; None where there is none."""
    pieces: list[str] = []
    if (yield from reader.peek()) != '"' or not (yield from _string(reader, pieces.append)):
        return None
    return _decoded("".join(pieces))


def _decoded(literal: str) -> str | None:
    try:
        found = parse_json(literal, "a text")
    except UserError:
        return None
    return found if isinstance(found, str) else None


def call_object(reader: Reader, output: Output, keys: CallKeys) -> Steps[Outcome]:
    """Reads {"name": ..., "arguments": ...}, and begins the call as soon as its name is known.

    Arguments in front of the name, or in a JSON text, are emitted when they are whole.
    """
    name: str | None = None
    early: list[str] | None = None  # arguments ahead of the name
    begun = False
    if not (yield from reader.literal("{")):
        return Outcome.NONE
    yield from reader.spaces()
    while not (yield from reader.literal("}")):
        key = yield from _text(reader)
        yield from reader.spaces()
        if key is None or not (yield from reader.literal(":")):
            return Outcome.CUT if begun else Outcome.NONE
        yield from reader.spaces()
        if key == "name" and name is None:
            name = yield from _text(reader)
            if not name or (keys.names is not None and name not in keys.names):
                return Outcome.NONE
        elif key in keys.arguments and name is not None and not begun:
            begun = True
            output.begin_call(name)
            if not (yield from arguments(reader, output.arguments)):
                return Outcome.CUT
        elif key in keys.arguments and early is None and not begun:
            early = []
            if not (yield from arguments(reader, early.append)):
                return Outcome.NONE
        else:
            is_allowed = keys.others is None or key in keys.others
            if not is_allowed or not (yield from value(reader, lambda _: None)):
                return Outcome.CUT if begun else Outcome.NONE
        yield from reader.spaces()
        if (yield from reader.literal(",")):
            yield from reader.spaces()
        elif (yield from reader.peek()) != "}":
            return Outcome.CUT if begun else Outcome.NONE
    if not begun:
        if name is None:
            return Outcome.NONE
        output.begin_call(name)
        output.arguments("".join(early) if early else NO_ARGUMENTS)
    return Outcome.WHOLE


def arguments(reader: Reader, emit: Emit) -> Steps[bool]:
    """Reads a call's arguments: JSON, emitted as it comes, null for none, or a text of JSON."""
    character = yield from reader.peek()
    if character in _CLOSERS:
        return (yield from value(reader, emit))
    pieces: list[str] = []
    is_whole = yield from value(reader, pieces.append)
    text = "".join(pieces)
    if text == "null":
        text = NO_ARGUMENTS
    elif is_whole and text.startswith('"'):
        decoded = _decoded(text)
        text = text if decoded is None else decoded or NO_ARGUMENTS
    emit(text)
    return is_whole
